// The kernels compiled once for each kind of processor; module.cpp picks one at run time.
#pragma once
#include "../adam_rule.h"
#include "../tensor_table.h"

namespace statestream {

// Updates elements [begin, end) of one row.
using AdamRange = void (*)(const TensorRow &, const AdamScalars<float> &, int64_t begin, int64_t end);

// What the generic kernel is told of a call; it takes whatever has_kernel().
struct GenericCall {
  TableFormats formats;
  uint64_t seed;
  int32_t stochastic;
};
// The same, extras null where the call needs none; `begin` is a multiple of 256.
using GenericRange = void (*)(const GenericCall &, const TensorRow &, const RowExtras *, const AdamScalars<float> &,
                              int64_t begin, int64_t end);

// Elements [begin, end) to FP32, from FP32. Of a scaled format `scale` is that of element 0 and `begin` a
// multiple of 256; other formats do not look at it.
using DecodeRange = void (*)(const void *from, const float *scale, float *to, int64_t begin, int64_t end);
using EncodeRange = void (*)(const float *from, void *to, float *scale, int64_t begin, int64_t end);
// Where the weight is not its master rounded, the master becomes the weight.
using RefreshRange = void (*)(const void *weight, void *master, float *scale, int64_t begin, int64_t end);

struct Form {
  const char *name;
  bool (*supported)();
  AdamRange (*adam)(const TableFormats &);  // nullptr: the generic kernel's
  GenericRange generic;
  DecodeRange (*decode)(int32_t format, bool root);  // nullptr, as the next two: no kernel
  EncodeRange (*encode)(int32_t format, bool root);
  RefreshRange (*refresh)(int32_t param, int32_t master);
};

extern const Form kPortableForm;
#if defined(__x86_64__)
extern const Form kAvx2Form, kAvx512Form, kAvx512Bf16Form;
#endif

// The forms that this processor can run, best first.
const Form *const *supported_forms(int *count);

}  // namespace statestream
