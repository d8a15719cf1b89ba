// Contents of tensors, from a seed.
#pragma once
#include <stdint.h>
#include <string.h>

#include "../../csrc/scaled_formats.h"

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  // SplitMix64 (Steele, Lea, Flood 2014).
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return (double)(next() >> 11) * 0x1p-53; }  // [0, 1)

 private:
  uint64_t state_;
};

enum class Values { kOrdinary, kAnyBits, kZeroRows };
enum class Role { kWeight, kGrad, kExpAvg, kExpAvgSq, kMaster };

inline float ordinary(Role role, Random &random) {
  const double x = 2 * random.uniform() - 1;
  switch (role) {
    case Role::kExpAvg: return (float)(0.1 * x);
    case Role::kExpAvgSq: return (float)(0.01 * x * x);
    default: return (float)x;
  }
}

// A number in 8 or 16 bits, other than BF16, is a payload: `x` under the scale that fill_scales gives its kind.
inline uint32_t payload_of(int32_t format, float x) {
  using namespace statestream;
  if (format == kFloat16) return float16_store_bits(x);
  uint32_t payload = 0;
  with_format<kState, true>(format, [&](auto f) {
    payload = payload_store<PayloadOf<f.kCode>, false>(x, format == kScaledFloat16 ? 1024.0f : 256.0f, 0);
  });
  return payload;
}

// One a block. kAnyBits: every power of two and, now and then, no power of two at all.
inline void fill_scales(uint8_t *to, int64_t n, int32_t format, Values values, Random &random) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = statestream::bits_of(format == statestream::kScaledFloat16 ? 0x1p-10f : 0x1p-8f);
    if (values == Values::kAnyBits) {
      bits = (uint32_t)random.next() & 0x7f800000u;
      if (random.next() % 16 == 0) bits = (uint32_t)random.next();
    }
    memcpy(to + 4 * i, &bits, 4);
  }
}

// kAnyBits: every pattern, NaN and infinities more often than by chance. kZeroRows: as of weights that
// no gradient ever reached, with one in nine touched.
inline void fill(uint8_t *to, int64_t n, int32_t format, Role role, Values values, Random &random) {
  const int64_t bytes = statestream::format_bytes(format);
  for (int64_t i = 0; i < n; ++i) {
    float x = ordinary(role, random);
    const bool moves = role != Role::kWeight && role != Role::kMaster;
    if (values == Values::kZeroRows && moves && random.next() % 9) x = random.next() % 2 ? 0.0f : -0.0f;
    const bool payload = format >= statestream::kFloat16;
    uint32_t bits = payload ? payload_of(format, x) << (32 - 8 * bytes) : statestream::bits_of(x);
    if (values == Values::kAnyBits) {
      bits = (uint32_t)random.next();
      if (random.next() % 16 == 0) bits |= 0x7f800000u;
      if (random.next() % 16 == 0) bits &= 0xff80ffffu;
      if (payload && random.next() % 16 == 0) bits &= 0x0fffffffu;  // small, denormal, zero
    }
    if (format == statestream::kRemainder) bits = (uint32_t)random.next() << 16;
    bits >>= 32 - 8 * bytes;
    memcpy(to + i * bytes, &bits, bytes);
  }
}
