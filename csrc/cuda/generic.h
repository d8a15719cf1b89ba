// What generic.cu has for adam.cu and convert.cu.
#pragma once
#include <memory>

#include "adam.h"

namespace statestream {

struct GenericParameters;  // generic_kernel.cuh, as this
struct GenericRow;

// Rows on their way into one launch of the generic kernel. The device is current while it lives.
class GenericBatch {
 public:
  GenericBatch(const TableFormats &formats, const AdamOptions &options, uint64_t found_inf, const CallExtras &extras,
               const Place &place);
  ~GenericBatch();

  // A row by its count of updates; with scalars formed on the host.
  void add(const TensorRow &row, const RowExtras *extras, float step, double grad_scale);
  // By the counter on the device, from which the scalars at that address there were formed.
  void add(const TensorRow &row, const RowExtras *extras, const AdamScalars<float> *scalars);

  void flush();

 private:
  GenericRow &place(const TensorRow &row, const RowExtras *extras);

  const AdamOptions options_;
  const Place place_;
  int64_t blocks_;
  std::unique_ptr<GenericParameters> parameters_;
  float step_;  // whose scalars these are
  AdamScalars<float> scalars_;
};

// Of n elements from the start of a block on: a scaled state to FP32 or from it, or masters from weights.
struct GenericConversion {
  enum Work : int32_t { kDecode, kEncode, kRefresh };
  uint64_t from, to;     // bytes 0, 8
  uint64_t scale;        // byte 16: address of the first block's; 0 where there is none
  Work work;             // byte 24
  int32_t format;        // byte 28: of the state; of the master
  int32_t param_format;  // byte 32: kRefresh only
  int32_t root;          // byte 36: whether the state is of square roots
};

void generic_convert(const GenericConversion &conversion, int64_t n, const Place &place);

}  // namespace statestream
