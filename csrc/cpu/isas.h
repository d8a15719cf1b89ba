// The kernels are compiled once for each instruction set; module.cpp picks one at run time.
#pragma once
#include <vector>

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

// The kernels as compiled for one instruction set.
struct Isa {
  const char *name;
  bool (*supported)();
  AdamRange (*adam)(const TableFormats &);  // nullptr: the generic kernel's
  GenericRange generic;
  DecodeRange (*decode)(int32_t format, bool root);  // nullptr, as the next two: no kernel
  EncodeRange (*encode)(int32_t format, bool root);
  RefreshRange (*refresh)(int32_t param, int32_t master);
};

extern const Isa kPortableIsa;
#if defined(__x86_64__)
extern const Isa kAvx2Isa, kAvx512Isa, kAvx512Bf16Isa;
#endif

// Those that this processor runs, best first.
const std::vector<const Isa *> &supported_isas();

}  // namespace statestream
