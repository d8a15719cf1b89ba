// The kernels compiled once for each kind of processor; module.cpp picks one at run time.
#pragma once
#include "../adam_rule.h"
#include "../tensor_table.h"

namespace statestream {

// Updates elements [begin, end) of one row.
using AdamRange = void (*)(const TensorRow &, const AdamScalars<float> &, int64_t begin, int64_t end);
// Elements [begin, end): to FP32, from FP32.
using DecodeRange = void (*)(const void *from, float *to, int64_t begin, int64_t end);
using EncodeRange = void (*)(const float *from, void *to, int64_t begin, int64_t end);
// Where the weight is not its master rounded, the master becomes the weight.
using RefreshRange = void (*)(const uint16_t *weight, float *master, int64_t begin, int64_t end);

struct Form {
  const char *name;
  bool (*supported)();
  AdamRange (*adam)(const TableFormats &);  // nullptr: no kernel for these formats
  DecodeRange (*decode)(int32_t format);
  EncodeRange (*encode)(int32_t format);
  RefreshRange refresh;
};

extern const Form kPortableForm;
#if defined(__x86_64__)
extern const Form kAvx2Form, kAvx512Form, kAvx512Bf16Form;
#endif

// The forms that this processor can run, best first.
const Form *const *supported_forms(int *count);

}  // namespace statestream
