// One Adam call, by the emulated kernels and by the CPU kernel, compared bit for bit.
#pragma once
#include <string>
#include <vector>

#include "../../csrc/cuda/adam.h"
#include "guarded.h"
#include "values.h"

struct AdamCase {
  statestream::TableFormats formats;
  std::string lengths = "short";    // short, blocks, pieces, chunk, many
  std::string offsets = "aligned";  // aligned, together, varied, apart
  std::string steps = "same";       // same, different
  Values values = Values::kOrdinary;
  std::string betas = "long";  // or first, second: that one below 0.5
  bool l2 = false, maximize = false, bias_correction = true;
  bool capturable = false, advance = true;
  bool scalars_on_device = false, skip = false;  // capturable only: lr and grad_scale; found_inf of 1
  double grad_scale = 1;
  std::string map = "whole";  // or offset, columns, middle, experts, transposed: where its elements are in the whole
  int32_t stochastic = 0;     // flags; those that the formats do not take are left out
  uint64_t seed = 1;
};

// Empty where all bits agree and nothing outside was touched, else what differs.
std::string run(const AdamCase &c);
