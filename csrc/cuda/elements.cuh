// A lane's eight elements of a stream in any format: as words of memory, as numbers, and back.
//
// They are read and written by 64- or 128-bit accesses where the address allows and all eight are there, else
// one by one: head, tail and misaligned tensors are no cases of their own. Every path sets every word and
// number: one that leaves some undefined keeps their registers busy from one round to the next.
#pragma once
#include <type_traits>

#include "../random_bits.h"
#include "../scaled_formats.h"
#include "vectors.cuh"

namespace statestream {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpLanes = 32;
static_assert(kWarpLanes * kVector == kScaleBlock, "a warp has a block of a scaled format");

// Elements are bits of the words from the low end on; those from `count` on are not there, and zeros.
template <class Element>
STATESTREAM_DEVICE void load_elements(uint64_t address, int count, uint32_t (&w)[kVector]) {
  constexpr int kEach = 4 / (int)sizeof(Element);  // elements of a word
  constexpr int kWords = kVector / kEach;
#pragma unroll
  for (int k = 0; k < kVector; ++k) w[k] = 0;
  if (count == kVector && address % (kWords == 2 ? 8 : 16) == 0) {
    if constexpr (kWords == 2) {
      load_two_words((const void *)address, w);
    } else {
#pragma unroll
      for (int k = 0; k < kWords; k += 4) load_words((const void *)(address + 4 * k), w + k);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    if (k < count) w[k / kEach] |= (uint32_t)((const Element *)address)[k] << (k % kEach * 8 * sizeof(Element));
}

template <class Element>
STATESTREAM_DEVICE void store_elements(uint64_t address, int count, const uint32_t (&w)[kVector]) {
  constexpr int kEach = 4 / (int)sizeof(Element);
  constexpr int kWords = kVector / kEach;
  if (count == kVector && address % (kWords == 2 ? 8 : 16) == 0) {
    if constexpr (kWords == 2) {
      store_two_words((void *)address, w);
    } else {
#pragma unroll
      for (int k = 0; k < kWords; k += 4) store_words((void *)(address + 4 * k), w + k);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    if (k < count) ((Element *)address)[k] = (Element)(w[k / kEach] >> (k % kEach * 8 * sizeof(Element)));
}

// Elements [i, i + count) of a stream that begins at `address`.
STATESTREAM_DEVICE void load_format(int32_t format, uint64_t address, int64_t i, int count, uint32_t (&w)[kVector]) {
  switch (format_bytes(format)) {
    case 4: return load_elements<uint32_t>(address + 4 * i, count, w);
    case 2: return load_elements<uint16_t>(address + 2 * i, count, w);
    default: return load_elements<uint8_t>(address + i, count, w);
  }
}
STATESTREAM_DEVICE void store_format(int32_t format, uint64_t address, int64_t i, int count,
                                     const uint32_t (&w)[kVector]) {
  switch (format_bytes(format)) {
    case 4: return store_elements<uint32_t>(address + 4 * i, count, w);
    case 2: return store_elements<uint16_t>(address + 2 * i, count, w);
    default: return store_elements<uint8_t>(address + i, count, w);
  }
}

// What a stream may hold: no code is made for formats of other roles. kRoot: a format that has scales holds roots.
template <int32_t kIsRoles, bool kIsRoot = false, bool kIsScaled = false>
struct Stream {
  static constexpr bool kRoot = kIsRoot;
  template <class Work>
  STATESTREAM_DEVICE static bool with(int32_t format, const Work &work) {
    return with_format<kIsRoles, kIsScaled>(format, work);
  }
};
using GradStream = Stream<kGradient>;
using ParamStream = Stream<kParameter>;
using MasterStream = Stream<kMaster>;
using WeightStream = Stream<kParameter | kMaster>;  // a master, or a param that has none
using ExpAvgStream = Stream<kMoment>;
using ExpAvgSqStream = Stream<kMoment, true>;

STATESTREAM_DEVICE uint32_t half_of(const uint32_t *w, int k) { return w[k / 2] >> (k % 2 * 16) & 0xffffu; }
STATESTREAM_DEVICE uint32_t byte_of(const uint32_t *w, int k) { return w[k / 4] >> (k % 4 * 8) & 0xffu; }

template <class Number>
STATESTREAM_DEVICE void each(float (&x)[kVector], const Number &number) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) x[k] = number(k);
}

// Decodes the words into numbers. `scale` is the block's scale; formats without scales ignore it.
template <class Stream>
STATESTREAM_DEVICE void numbers_of(int32_t format, const uint32_t (&w)[kVector], float scale, float (&x)[kVector]) {
  const auto squared = [](float root) { return Stream::kRoot ? rn_mul(root, root) : root; };
  const bool known = Stream::with(format, [&](auto f) {
    each(x, [&](int k) {
      if constexpr (is_scaled(f.kCode)) {
        using Payload = PayloadOf<f.kCode>;
        const uint32_t payload = sizeof(typename Payload::Type) == 1 ? byte_of(w, k) : half_of(w, k);
        return squared(scaled_load<Payload>(payload, scale));
      } else if constexpr (f.kCode == kBFloat16) {
        return bfloat16_load((uint16_t)half_of(w, k));
      } else if constexpr (f.kCode == kFloat16) {
        return float16_load((uint16_t)half_of(w, k));
      } else {
        static_assert(f.kCode == kFloat32);
        return float_of(w[k]);
      }
    });
  });
  if (!known) each(x, [](int) { return 0.0f; });
}

// Where the scale of the block is that element i begins.
STATESTREAM_DEVICE float *scale_of(uint64_t scales, int64_t i) { return (float *)(scales + i / kScaleBlock * 4); }

template <class Magnitude>
STATESTREAM_DEVICE uint32_t largest_of(const float (&x)[kVector], const Magnitude &magnitude) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kVector; ++k) largest = magnitude(x[k]) > largest ? magnitude(x[k]) : largest;
  return largest;
}

// The scale of the block that the warp has, as bits, from its largest magnitude; zeros add nothing. `ordinary`:
// none of the lane's own is NaN, infinite or, of roots, has a sign.
template <class Payload, bool kRoot>
STATESTREAM_DEVICE uint32_t warp_scale_bits(const float (&x)[kVector], bool *ordinary) {
  uint32_t largest = largest_of(x, [](float y) { return kRoot ? bits_of(y) : bits_of(y) & 0x7fffffffu; });
  *ordinary = largest < 0x7f800000u;
  if (!*ordinary) largest = largest_of(x, [](float y) { return finite_magnitude(y); });
  return scale_bits<Payload>(__reduce_max_sync(kAllLanes, largest), kRoot);
}

// One lane reads it for all: what the others read, that lane would write with nothing between.
STATESTREAM_DEVICE float load_scale(const float *scale, int lane) {
  return __shfl_sync(kAllLanes, lane == 0 ? *scale : 0.0f, 0);
}

// payload_store of an ordinary number.
template <class Payload, bool kRoot, bool kStochastic>
STATESTREAM_DEVICE uint32_t ordinary_payload(float x, float inverse, uint32_t random) {
  const float magnitude = kRoot ? x : float_of(bits_of(x) & 0x7fffffffu);
  const uint32_t scaled = bits_of(rn_mul(magnitude, inverse));
  const uint32_t fitting = scaled < Payload::kLargest ? scaled : Payload::kLargest;
  const uint32_t payload =
      kStochastic ? payload_stochastic<Payload>(fitting, random) : payload_nearest<Payload>(fitting);
  return kRoot ? payload : payload | (bits_of(x) >> PayloadBits<Payload>::kSignShift & Payload::kSign);
}

template <class Payload, bool kRoot, bool kStochastic>
STATESTREAM_DEVICE void payloads_of(const float (&x)[kVector], bool ordinary, float inverse, const PhiloxBlock &random,
                                    uint32_t (&w)[kVector]) {
  constexpr int kEach = 4 / (int)sizeof(typename Payload::Type);
  const auto pack = [&](auto is_ordinary) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t bits = kStochastic ? half_of(random.word, k) : 0;
      uint32_t payload = decltype(is_ordinary)::value
                             ? ordinary_payload<Payload, kRoot, kStochastic>(x[k], inverse, bits)
                             : payload_store<Payload, kStochastic>(x[k], inverse, bits);
      // As in root_payload_store: a root that is not zero stays so.
      if (kRoot) payload |= (uint32_t)((payload == 0) & (x[k] != 0.0f));
      w[k / kEach] |= payload << (k % kEach * 32 / kEach);
    }
  };
  if (__builtin_expect(ordinary, 1))
    pack(std::true_type());
  else
    pack(std::false_type());
}

// A scaled block by its warp: lane 0 writes the scale, which is returned.
template <class Payload, bool kRoot>
STATESTREAM_DEVICE float scaled_words_of(const float (&x)[kVector], bool stochastic, const PhiloxBlock &random,
                                         int lane, float *scale, uint32_t (&w)[kVector]) {
  bool ordinary;
  const uint32_t bits = warp_scale_bits<Payload, kRoot>(x, &ordinary);
  if (lane == 0) *scale = float_of(bits);
  const float inverse = inverse_scale(bits);
  if (stochastic)
    payloads_of<Payload, kRoot, true>(x, ordinary, inverse, random, w);
  else
    payloads_of<Payload, kRoot, false>(x, ordinary, inverse, random, w);
  return float_of(bits);
}

// Encodes numbers into words; in a root stream with scales the numbers are roots. Rounds to nearest, or by `random`
// where `stochastic` and the format allow it. `nan`: any of the numbers may be NaN. All lanes of a warp call it
// together. In a scaled format it writes the block's scale and returns it.
template <class Stream>
STATESTREAM_DEVICE float words_of(int32_t format, const float (&x)[kVector], bool nan, bool stochastic,
                                  const PhiloxBlock &random, int lane, float *scale, uint32_t (&w)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) w[k] = 0;
  const auto pairs = [&](const auto &bits) {
#pragma unroll
    for (int k = 0; k < kVector; k += 2) w[k / 2] = bits(k) | (uint32_t)bits(k + 1) << 16;
  };
  float stored_scale = 1.0f;
  Stream::with(format, [&](auto f) {
    if constexpr (is_scaled(f.kCode)) {
      stored_scale = scaled_words_of<PayloadOf<f.kCode>, Stream::kRoot>(x, stochastic, random, lane, scale, w);
    } else if constexpr (f.kCode == kBFloat16) {
      if (stochastic) return pairs([&](int k) { return bfloat16_stochastic_bits(x[k], half_of(random.word, k)); });
#pragma unroll
      for (int k = 0; k < kVector; k += 2) w[k / 2] = cvt_rn_bf16x2(x[k + 1], x[k]);
      if (__builtin_expect(nan, 0)) {
#pragma unroll
        for (int k = 0; k < kVector / 2; ++k) w[k] = canonical_pair(w[k]);
      }
    } else if constexpr (f.kCode == kFloat16) {
      pairs([&](int k) { return float16_store_bits(x[k]); });
    } else {
      static_assert(f.kCode == kFloat32);
#pragma unroll
      for (int k = 0; k < kVector; ++k) w[k] = bits_of(x[k]);
      if (__builtin_expect(nan, 0)) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) w[k] = float32_store_bits(x[k]);
      }
    }
  });
  return stored_scale;
}

}  // namespace statestream
