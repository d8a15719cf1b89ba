// The kernels are compiled once for each instruction set; module.cpp picks one at run time.
#pragma once
#include <vector>

#include "../adam_rule.h"
#include "../tensor_table.h"

namespace statestream {

// Updates elements [begin, end) of one row.
using AdamRange = void (*)(const TensorRow &, const AdamScalars<float> &, int64_t begin, int64_t end);

// The arguments of the generic kernel that every row shares. It takes every combination that has_kernel() accepts.
struct GenericCall {
  TableFormats formats;
  uint64_t seed;
  int32_t stochastic;
};
// Updates elements [begin, end) of one row; `begin` is a multiple of 256. Extras are null where the call needs none.
using GenericRange = void (*)(const GenericCall &, const TensorRow &, const RowExtras *, const AdamScalars<float> &,
                              int64_t begin, int64_t end);

// Convert elements [begin, end) to FP32, and from FP32. In a scaled format `scale` is the address of the first block's
// scale, and `begin` is a multiple of 256. Other formats ignore `scale`.
using DecodeRange = void (*)(const void *from, const float *scale, float *to, int64_t begin, int64_t end);
using EncodeRange = void (*)(const float *from, void *to, float *scale, int64_t begin, int64_t end);
// Sets the master to the weight where the master does not round to it.
using RefreshRange = void (*)(const void *weight, void *master, float *scale, int64_t begin, int64_t end);

// The kernels as compiled for one instruction set.
struct Isa {
  const char *name;
  bool (*supported)();
  AdamRange (*adam)(const TableFormats &);  // nullptr: the generic kernel takes these formats
  GenericRange generic;
  DecodeRange (*decode)(int32_t format, bool root);  // This and the next two: nullptr where there is no kernel.
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
