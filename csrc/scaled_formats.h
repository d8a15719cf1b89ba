// FP16, and FP16 and FP8 payloads with one power-of-two scale a block of 256 elements.
// Block b is elements [256 b, 256 b + 256) of the tensor; the last may be short.
//
// FP8 is E4M3FN of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022): bias 7, largest 448, no
// infinity, NaN where all but the sign is ones. A block's scale is the smallest power of two at which its
// largest finite value fits the payload, so that scaling is exact and rounding cannot overflow. A second
// moment is stored as its square root ("root"): its range in decades is then the gradients' own, and the
// square of a payload is exact in FP32.
#pragma once
#include "number_formats.h"

namespace statestream {

// Of each scaled format.
template <int32_t kFormat>
struct PayloadOf;

template <>
struct PayloadOf<kScaledFloat16> {
  using Type = uint16_t;
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kSign = 0x8000u, kInfinity = 0x7c00u, kNan = 0x7e00u;
  static constexpr uint32_t kLargest = 0x477fe000u;  // FP32 bits of 65504
  // Biased exponents of the scales between which every payload times the scale, and of a root its square,
  // is exact in FP32: neither below its smallest denormal nor above its largest number.
  static constexpr int kLowestScale = 127 - 125, kHighestScale = 127 + 112;
  static constexpr int kLowestRootScale = 127 - 50, kHighestRootScale = 127 + 48;
};

using Float16Payload = PayloadOf<kScaledFloat16>;

template <>
struct PayloadOf<kScaledFloat8> {
  using Type = uint8_t;
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr bool kHasInfinity = false;
  static constexpr uint32_t kSign = 0x80u, kInfinity = 0x7fu, kNan = 0x7fu;
  static constexpr uint32_t kLargest = 0x43e00000u;  // FP32 bits of 448
  static constexpr int kLowestScale = 127 - 126, kHighestScale = 127 + 119;
  static constexpr int kLowestRootScale = 127 - 65, kHighestRootScale = 127 + 55;
};
using Float8Payload = PayloadOf<kScaledFloat8>;

// What follows from a payload's widths.
template <class Payload>
struct PayloadBits {
  static constexpr bool kIsFloat16 = sizeof(typename Payload::Type) == 2;  // FP16: a GPU converts it by itself
  static constexpr int kCut = 23 - Payload::kMantissaBits;  // FP32 mantissa bits that a normal payload has not
  static constexpr int kSignShift = 32 - 8 * (int)sizeof(typename Payload::Type);  // from the payload's sign to FP32's
  static constexpr uint32_t kRebias = (uint32_t)(127 - Payload::kBias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
  static constexpr uint32_t kUnit = kSmallestNormal - ((uint32_t)Payload::kMantissaBits << 23);  // smallest denormal
  static constexpr uint32_t kUnitTimes2To23 = kUnit + (23u << 23);
  static constexpr uint32_t k2To16OverUnit = (254u << 23) - kUnit + (16u << 23);
};

#if defined(__CUDA_ARCH__)
// FP16 is the hardware's own: one instruction each. The bits are those below, but for NaN, which both meet as
// any NaN.
STATESTREAM_HD uint32_t float16_of_float32(uint32_t bits) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(float_of(bits)));
  return half;
}
STATESTREAM_HD float float32_of_float16(uint32_t half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)half));
  return x;
}
#endif

// The payload, without sign, of an FP32 magnitude (its bits) that is at most Payload::kLargest; to
// nearest even. Denormals round by an addition whose result has the payload's smallest number as its unit.
template <class Payload>
STATESTREAM_HD uint32_t payload_nearest(uint32_t magnitude) {
#if defined(__CUDA_ARCH__)
  if (PayloadBits<Payload>::kIsFloat16) return float16_of_float32(magnitude);
#endif
  using Bits = PayloadBits<Payload>;
  const uint32_t half_less_one = (1u << (Bits::kCut - 1)) - 1;
  const uint32_t odd = (magnitude >> Bits::kCut) & 1u;
  const uint32_t normal = (magnitude - Bits::kRebias + half_less_one + odd) >> Bits::kCut;
  const uint32_t denormal =
      bits_of(rn_add(float_of(magnitude), float_of(Bits::kUnitTimes2To23))) - Bits::kUnitTimes2To23;
  return select_bits(magnitude < Bits::kSmallestNormal, denormal, normal);
}

// The same rounded up with a probability of what is cut off, in units of the last place: `random` is 16
// bits. What is exact stays; what is cut below 2^-16 of a unit is dropped.
template <class Payload>
STATESTREAM_HD uint32_t payload_stochastic(uint32_t magnitude, uint32_t random) {
  using Bits = PayloadBits<Payload>;
  // The highest random bit is worth half a unit.
  constexpr int kUp = Bits::kCut > 16 ? Bits::kCut - 16 : 0, kDown = Bits::kCut < 16 ? 16 - Bits::kCut : 0;
  const uint32_t added = random << kUp >> kDown;
  const uint32_t normal = (magnitude - Bits::kRebias + added) >> Bits::kCut;
  const bool is_denormal = magnitude < Bits::kSmallestNormal;
  // A normal one would not fit an int32.
  const float units = rn_mul(float_of(select_bits(is_denormal, magnitude, 0)), float_of(Bits::k2To16OverUnit));
  const uint32_t denormal = ((uint32_t)(int32_t)units + random) >> 16;
  return select_bits(is_denormal, denormal, normal);
}

// The number that a payload stands for, before its scale.
template <class Payload>
STATESTREAM_HD float payload_load(uint32_t payload) {
  using Bits = PayloadBits<Payload>;
  const uint32_t magnitude = payload & (Payload::kSign - 1);
  const uint32_t sign = (payload & Payload::kSign) << Bits::kSignShift;
#if defined(__CUDA_ARCH__)
  if (Bits::kIsFloat16) return float32_of_float16(payload);
  // Exponent bits as FP32's, a denormal as one there too: exact, and not slow on a GPU. NaN is then beyond the largest.
  const int32_t spread = (int32_t)(payload << Bits::kSignShift) >> (Bits::kSignShift - Bits::kCut);
  const uint32_t bits = (uint32_t)spread & (0x80000000u | (Payload::kSign - 1) << Bits::kCut);
  const float number = rn_mul(float_of(bits), float_of((uint32_t)(254 - Payload::kBias) << 23));
  if (Payload::kHasInfinity && magnitude == Payload::kInfinity) return float_of(sign | 0x7f800000u);
  return fabsf(number) > float_of(Payload::kLargest) ? float_of(kQuietNan) : number;
#else
  const uint32_t normal = (magnitude << Bits::kCut) + Bits::kRebias;
  const uint32_t denormal = bits_of(rn_mul((float)(int32_t)magnitude, float_of(Bits::kUnit)));
  const uint32_t finite = select_bits(magnitude < 1u << Payload::kMantissaBits, denormal, normal);
  const uint32_t special =
      select_bits(magnitude == Payload::kInfinity && Payload::kHasInfinity, 0x7f800000u, kQuietNan);
  return float_of(sign | select_bits(magnitude < Payload::kInfinity, finite, special));
#endif
}

// x times inverse_scale, a power of two, as a payload. kStochastic: by `random`, 16 bits; else to nearest
// even. Finite values beyond the largest payload become it: the scale had to be clamped.
template <class Payload, bool kStochastic>
STATESTREAM_HD uint32_t payload_store(float x, float inverse_scale, uint32_t random) {
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t sign = bits_of(x) >> PayloadBits<Payload>::kSignShift & Payload::kSign;
  const uint32_t scaled = bits_of(rn_mul(float_of(magnitude), inverse_scale));
  const uint32_t fitting = select_bits(scaled < Payload::kLargest, scaled, Payload::kLargest);
  const uint32_t finite =
      kStochastic ? payload_stochastic<Payload>(fitting, random) : payload_nearest<Payload>(fitting);
  const bool infinite = Payload::kHasInfinity && magnitude == 0x7f800000u;
  const uint32_t special = select_bits(infinite, sign | Payload::kInfinity, Payload::kNan);
  return select_bits(magnitude < 0x7f800000u, sign | finite, special);
}

// The payload of the root of a second moment. One that is not zero stays so: under a first moment that is
// not, zero would make the step explode. Below zero there is no root: NaN.
template <class Payload, bool kStochastic>
STATESTREAM_HD uint32_t root_payload_store(float x, float inverse_scale, uint32_t random) {
  const uint32_t payload = payload_store<Payload, kStochastic>(rn_sqrt(x), inverse_scale, random);
  return payload | (uint32_t)((payload == 0) & (x != 0.0f));
}

template <class Payload>
STATESTREAM_HD float scaled_load(uint32_t payload, float scale) {
  return rn_mul(payload_load<Payload>(payload), scale);
}

template <class Payload>
STATESTREAM_HD float root_load(uint32_t payload, float scale) {
  const float root = scaled_load<Payload>(payload, scale);
  return rn_mul(root, root);
}

// What x adds to its block's largest magnitude: its bits, 0 where it is not finite (or, of a second
// moment, below zero). The block's scale follows from the maximum of these, as integers.
STATESTREAM_HD uint32_t finite_magnitude(float x) {
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}
STATESTREAM_HD uint32_t finite_square(float x) {
  const uint32_t u = bits_of(x);
  return u < 0x7f800000u ? u : 0u;
}

// The scale's FP32 bits, from the bits of a block's largest magnitude (of roots where `root`); 1 for zeros.
template <class Payload>
STATESTREAM_HD uint32_t scale_bits(uint32_t largest, bool root) {
  // A mantissa above that of the payload's largest number carries into the exponent.
  const uint32_t carry = 0x7fffffu - (Payload::kLargest & 0x7fffffu);
  const int exponent = (int)((largest + carry) >> 23) - (int)(Payload::kLargest >> 23) + 127;
  const int lowest = root ? Payload::kLowestRootScale : Payload::kLowestScale;
  const int highest = root ? Payload::kHighestRootScale : Payload::kHighestScale;
  const int clamped = exponent < lowest ? lowest : exponent > highest ? highest : exponent;
  return largest ? (uint32_t)clamped << 23 : 0x3f800000u;
}

// The same from the largest finite_square of a block: the root of the largest is the largest root.
template <class Payload>
STATESTREAM_HD uint32_t root_scale_bits(uint32_t largest_square) {
  return scale_bits<Payload>(bits_of(rn_sqrt(float_of(largest_square))), true);
}

// 1 / scale, exact.
STATESTREAM_HD float inverse_scale(uint32_t scale) { return float_of((254u << 23) - scale); }

// FP16 without a scale: IEEE's, to nearest even, overflow to infinity.
STATESTREAM_HD uint16_t float16_store_bits(float x) {
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t finite = payload_store<Float16Payload, false>(x, 1.0f, 0);
  const uint32_t infinity = (finite & Float16Payload::kSign) | Float16Payload::kInfinity;
  // From halfway between the largest number and the next, 65536, on: that one, even, is infinity.
  return (uint16_t)select_bits((magnitude >= 0x477ff000u) & (magnitude <= 0x7f800000u), infinity, finite);
}
STATESTREAM_HD float float16_load(uint16_t half) { return payload_load<Float16Payload>(half); }

}  // namespace statestream
