// Decoding, encoding and refreshing of masters by the emulated kernels against the CPU's, for every
// short length and some long ones.
#pragma once
#include <string>

#include "values.h"

struct ConvertCase {
  std::string what;      // decode, encode, refresh_master
  int32_t format;        // of the state, or of the master
  int32_t param_format;  // refresh_master only
  bool root;
  int64_t from_offset, to_offset;  // elements past a 64-byte boundary
  Values values;
  uint64_t seed;
};

std::string run_convert(const ConvertCase &c);
