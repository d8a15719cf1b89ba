// How a thread reads and writes the formats: eight elements by 128-bit accesses, or one.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "../number_formats.h"

namespace statestream {

#define STATESTREAM_DEVICE __device__ __forceinline__

constexpr int kVector = 8;  // elements of a thread's accesses: 128 bits of BF16

// Streaming accesses: each byte of state is used once a step and would only push others out of L2.
STATESTREAM_DEVICE void load_words(const void *from, uint32_t *w) {
  const uint4 a = __ldcs(static_cast<const uint4 *>(from));
  w[0] = a.x;
  w[1] = a.y;
  w[2] = a.z;
  w[3] = a.w;
}
STATESTREAM_DEVICE void store_words(void *to, const uint32_t *w) {
  __stcs(static_cast<uint4 *>(to), make_uint4(w[0], w[1], w[2], w[3]));
}
STATESTREAM_DEVICE void load_two_words(const void *from, uint32_t *w) {
  const uint2 a = __ldcs(static_cast<const uint2 *>(from));
  w[0] = a.x;
  w[1] = a.y;
}
STATESTREAM_DEVICE void store_two_words(void *to, const uint32_t *w) {
  __stcs(static_cast<uint2 *>(to), make_uint2(w[0], w[1]));
}

#if defined(__CUDACC__)
// Two floats rounded to nearest even by one instruction, which makes a NaN 0x7fff.
STATESTREAM_DEVICE uint32_t cvt_rn_bf16x2(float high, float low) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// The quiet NaN for any NaN in a pair of BF16.
STATESTREAM_DEVICE uint32_t canonical_pair(uint32_t pair) {
  const uint32_t nan = (((pair & 0x7fff7fffu) + 0x007f007fu) >> 15) & 0x00010001u;
  const uint32_t mask = nan * 0xffffu;
  return (pair & ~mask) | (0x7fc07fc0u & mask);
}

STATESTREAM_DEVICE bool any_nan(const float (&x)[kVector]) {
  bool found = false;
#pragma unroll
  for (int k = 0; k < kVector; ++k) found |= x[k] != x[k];
  return found;
}

// Formats. `nan` tells whether any of the eight may be NaN: other vectors are spared its rule.
struct Float32 {
  using Type = float;

  STATESTREAM_DEVICE static void load(const float *from, float (&x)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; k += 4) {
      uint32_t w[4];
      load_words(from + k, w);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[k + j] = float_of(w[j]);
    }
  }
  STATESTREAM_DEVICE static void store(float *to, const float (&x)[kVector], bool nan) {
    uint32_t w[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) w[k] = bits_of(x[k]);
    if (__builtin_expect(nan, 0)) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) w[k] = float32_store_bits(x[k]);
    }
    store_words(to, w);
    store_words(to + 4, w + 4);
  }

  STATESTREAM_DEVICE static float load_one(const float *from) { return *from; }
  STATESTREAM_DEVICE static void store_one(float *to, float x) { *to = float_of(float32_store_bits(x)); }
};

struct BFloat16 {
  using Type = uint16_t;

  STATESTREAM_DEVICE static void load(const uint16_t *from, float (&x)[kVector]) {
    uint32_t w[4];
    load_words(from, w);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = float_of(w[k] << 16);
      x[2 * k + 1] = float_of(w[k] & 0xffff0000u);
    }
  }
  STATESTREAM_DEVICE static void store(uint16_t *to, const float (&x)[kVector], bool nan) {
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = cvt_rn_bf16x2(x[2 * k + 1], x[2 * k]);
    if (__builtin_expect(nan, 0)) {
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = canonical_pair(w[k]);
    }
    store_words(to, w);
  }

  STATESTREAM_DEVICE static float load_one(const uint16_t *from) { return bfloat16_load(*from); }
  STATESTREAM_DEVICE static void store_one(uint16_t *to, float x) { *to = bfloat16_store_bits(x); }
};

// What reads and writes a state that has no scales.
template <int32_t kFormat>
using VectorsOf =
    std::conditional_t<kFormat == kFloat32, Float32, std::conditional_t<kFormat == kBFloat16, BFloat16, void>>;

// How the weight is kept: by itself, as an FP32 master beside it, or as its low 16 bits beside it.
template <class Format>
struct PlainWeight {
  using Param = typename Format::Type;
  using Master = char;  // none

  STATESTREAM_DEVICE static void load(const Param *param, const Master *, int64_t i, float (&p)[kVector]) {
    Format::load(param + i, p);
  }
  STATESTREAM_DEVICE static void store(Param *param, Master *, int64_t i, const float (&p)[kVector], bool nan) {
    Format::store(param + i, p, nan);
  }

  STATESTREAM_DEVICE static float load_one(const Param *param, const Master *, int64_t i) {
    return Format::load_one(param + i);
  }
  STATESTREAM_DEVICE static void store_one(Param *param, Master *, int64_t i, float p) {
    Format::store_one(param + i, p);
  }
};

struct MasterWeight {
  using Param = uint16_t;
  using Master = float;

  STATESTREAM_DEVICE static void load(const Param *, const Master *master, int64_t i, float (&p)[kVector]) {
    Float32::load(master + i, p);
  }
  STATESTREAM_DEVICE static void store(Param *param, Master *master, int64_t i, const float (&p)[kVector], bool nan) {
    Float32::store(master + i, p, nan);
    BFloat16::store(param + i, p, nan);
  }

  STATESTREAM_DEVICE static float load_one(const Param *, const Master *master, int64_t i) { return master[i]; }
  STATESTREAM_DEVICE static void store_one(Param *param, Master *master, int64_t i, float p) {
    Float32::store_one(master + i, p);
    BFloat16::store_one(param + i, p);
  }
};

struct RemainderWeight {
  using Param = uint16_t;
  using Master = uint16_t;

  STATESTREAM_DEVICE static void load(const Param *param, const Master *low, int64_t i, float (&p)[kVector]) {
    uint32_t weights[4], lows[4];
    load_words(param + i, weights);
    load_words(low + i, lows);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      p[2 * k] = join_master((uint16_t)weights[k], (uint16_t)lows[k]);
      p[2 * k + 1] = join_master((uint16_t)(weights[k] >> 16), (uint16_t)(lows[k] >> 16));
    }
  }
  STATESTREAM_DEVICE static void store(Param *param, Master *low, int64_t i, const float (&p)[kVector], bool nan) {
    uint32_t u[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) u[k] = bits_of(p[k]);
    if (__builtin_expect(nan, 0)) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) u[k] = float32_store_bits(p[k]);
    }
    uint32_t weights[4], lows[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weights[k] = ((u[2 * k] + 0x8000u) >> 16) | ((u[2 * k + 1] + 0x8000u) & 0xffff0000u);
      lows[k] = (u[2 * k] & 0xffffu) | (u[2 * k + 1] << 16);
    }
    store_words(param + i, weights);
    store_words(low + i, lows);
  }

  STATESTREAM_DEVICE static float load_one(const Param *param, const Master *low, int64_t i) {
    return join_master(param[i], low[i]);
  }
  STATESTREAM_DEVICE static void store_one(Param *param, Master *low, int64_t i, float p) {
    split_master(p, param + i, low + i);
  }
};

}  // namespace statestream
