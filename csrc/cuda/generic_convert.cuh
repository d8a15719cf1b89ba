// The device side of conversions that convert.cu has no kernels for: states with scales, and masters of any parameter.
// A warp converts a block of 256 elements, as in generic_kernel.cuh.
#pragma once
#include "elements.cuh"
#include "generic.h"

namespace statestream {

struct GenericConvertParameters {
  GenericConversion work;  // byte 0
  int64_t n;               // byte 40
};
static_assert(sizeof(GenericConvertParameters) == 48, "documented layout");

constexpr int kConvertThreads = 128;
constexpr int kConvertWarps = kConvertThreads / kWarpLanes;

using ScaledStream = Stream<kState, false, true>;
using ScaledRootStream = Stream<kState, true, true>;

STATESTREAM_DEVICE void float32_words(const float (&x)[kVector], uint32_t (&w)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) w[k] = float32_store_bits(x[k]);
}

template <class Stream>
STATESTREAM_DEVICE void decode_block(const GenericConversion &a, int64_t i, int count, const float *scale) {
  uint32_t words[kVector];
  float x[kVector];
  load_format(a.format, a.from, i, count, words);
  numbers_of<Stream>(a.format, words, *scale, x);
  float32_words(x, words);
  store_format(kFloat32, a.to, i, count, words);
}

template <class Stream>
STATESTREAM_DEVICE void encode_block(const GenericConversion &a, int64_t i, int count, int lane, float *scale) {
  uint32_t words[kVector];
  float x[kVector];
  load_format(kFloat32, a.from, i, count, words);
  each(x, [&](int k) { return Stream::kRoot ? rn_sqrt(float_of(words[k])) : float_of(words[k]); });
  words_of<Stream>(a.format, x, true, false, PhiloxBlock{}, lane, scale, words);
  store_format(a.format, a.to, i, count, words);
}

// Sets the master to the weight where the master does not round to it.
STATESTREAM_DEVICE void refresh_block(const GenericConversion &a, int64_t i, int count, int lane, float *scale) {
  uint32_t weights[kVector], masters[kVector], rounded[kVector];
  float w[kVector], x[kVector];
  load_format(a.param_format, a.from, i, count, weights);
  load_format(a.format, a.to, i, count, masters);
  numbers_of<ParamStream>(a.param_format, weights, 1.0f, w);
  numbers_of<MasterStream>(a.format, masters, is_scaled(a.format) ? load_scale(scale, lane) : 1.0f, x);
  words_of<ParamStream>(a.param_format, x, true, false, PhiloxBlock{}, lane, nullptr, rounded);
  uint32_t changed = 0;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const bool differs = half_of(rounded, k) != half_of(weights, k);
    x[k] = differs ? w[k] : x[k];
    if (!is_scaled(a.format)) masters[k] = differs ? float32_store_bits(w[k]) : masters[k];
    changed |= differs;
  }
  // In a scaled block one new value may change the scale: then all elements are stored again.
  if (is_scaled(a.format)) {
    if (!__reduce_max_sync(kAllLanes, changed)) return;
    words_of<MasterStream>(a.format, x, true, false, PhiloxBlock{}, lane, scale, masters);
  } else if (!changed) {
    return;
  }
  store_format(a.format, a.to, i, count, masters);
}

static __global__ void __launch_bounds__(kConvertThreads)
    generic_convert_kernel(const GenericConvertParameters __grid_constant__ a) {
  const int lane = (int)threadIdx.x % kWarpLanes, warp = (int)threadIdx.x / kWarpLanes;
  const int64_t step = (int64_t)gridDim.x * kConvertWarps * kScaleBlock;
  for (int64_t block = ((int64_t)blockIdx.x * kConvertWarps + warp) * kScaleBlock; block < a.n; block += step) {
    const int64_t i = block + lane * kVector;
    const int count = i + kVector <= a.n ? kVector : i < a.n ? (int)(a.n - i) : 0;
    float *scale = scale_of(a.work.scale, block);
    switch (a.work.work) {
      case GenericConversion::kDecode:
        if (a.work.root)
          decode_block<ScaledRootStream>(a.work, i, count, scale);
        else
          decode_block<ScaledStream>(a.work, i, count, scale);
        break;
      case GenericConversion::kEncode:
        if (a.work.root)
          encode_block<ScaledRootStream>(a.work, i, count, lane, scale);
        else
          encode_block<ScaledStream>(a.work, i, count, lane, scale);
        break;
      case GenericConversion::kRefresh: refresh_block(a.work, i, count, lane, scale); break;
    }
  }
}

}  // namespace statestream
