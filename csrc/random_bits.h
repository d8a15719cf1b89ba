// The bits of stochastic rounding: Philox4x32-10 of Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers:
// As Easy as 1, 2, 3" (2011), keyed so that an element's bits depend on what it is and on nothing else.
#pragma once
#include "number_formats.h"

namespace statestream {

struct PhiloxBlock {
  uint32_t word[4];
};

STATESTREAM_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

STATESTREAM_HD PhiloxBlock philox4x32_10(PhiloxBlock c, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xd2511f53u, kMultiplier1 = 0xcd9e8d57u;
  constexpr uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;  // of the golden ratio; of sqrt(3) - 1
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = high_product(kMultiplier0, c.word[0]), low0 = kMultiplier0 * c.word[0];
    const uint32_t high1 = high_product(kMultiplier1, c.word[2]), low1 = kMultiplier1 * c.word[2];
    c = {{high1 ^ c.word[1] ^ key0, low1, high0 ^ c.word[3] ^ key1, low0}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

// Whose bits: a seed of the optimizer, the parameter's ordinal, which of its tensors (StochasticTensor), its
// step (after the count has advanced).
struct RandomKey {
  uint64_t seed;
  uint32_t ordinal;
  uint32_t tensor_and_step;
};

// Rounds toward zero; what no int32_t holds becomes the nearest that there is, and NaN 0, as on the device: in C++ such
// a conversion has no meaning.
STATESTREAM_HD int32_t saturated(float x) {
#if defined(__CUDA_ARCH__)
  return (int32_t)x;
#else
  if (x != x) return 0;
  return x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : (int32_t)x;
#endif
}

STATESTREAM_HD RandomKey random_key(uint64_t seed, uint32_t ordinal, int32_t tensor, float step) {
  return {seed, ordinal, (uint32_t)tensor | (uint32_t)saturated(step) << 2};
}

// 128 bits: 16 for each of the eight elements whose global index is 8 * group + 0..7.
STATESTREAM_HD PhiloxBlock random_group(const RandomKey &key, uint64_t group) {
  const PhiloxBlock counter{{(uint32_t)group, (uint32_t)(group >> 32), key.ordinal, key.tensor_and_step}};
  return philox4x32_10(counter, (uint32_t)key.seed, (uint32_t)(key.seed >> 32));
}

// Those of the element with a global index in the group: the low half of a word comes first.
STATESTREAM_HD uint32_t random_bits(const PhiloxBlock &group, uint64_t global_index) {
  // Chosen word by word: an indexed array would leave the registers.
  const uint32_t low = global_index & 2 ? group.word[1] : group.word[0];
  const uint32_t high = global_index & 2 ? group.word[3] : group.word[2];
  return ((global_index & 4 ? high : low) >> (16 * (global_index & 1))) & 0xffffu;
}

// BF16, rounded away from zero with a probability of what is cut off, by 16 random bits. From the largest
// finite number on to nearest even: chance makes no infinity.
STATESTREAM_HD uint16_t bfloat16_stochastic_bits(float x, uint32_t random) {
  const uint32_t u = bits_of(x);
  return (u & 0x7fffffffu) > 0x7f7f0000u ? bfloat16_store_bits(x) : (uint16_t)((u + random) >> 16);
}

}  // namespace statestream
