// Blocks of 256 FP32 numbers from and to the formats that isa_kernels.h has no vectors for. The loops are
// of scalar functions, written so that the compiler makes vectors of them.
#pragma once
#include "../random_bits.h"
#include "../scaled_formats.h"
#include "isa_kernels.h"

namespace {

using statestream::Float16Payload;
using statestream::PayloadOf;

constexpr int kBlock = (int)statestream::kScaleBlock;
static_assert(kBlock % kWidth == 0, "a block is whole vectors");

template <class Payload, bool kRoot>
void load_payloads(const void *from, float scale, float *to) {
  const auto *payload = (const typename Payload::Type *)from;
  for (int i = 0; i < kBlock; ++i)
    to[i] = statestream::float_of(
        statestream::float32_store_bits(kRoot ? statestream::root_load<Payload>(payload[i], scale)
                                              : statestream::scaled_load<Payload>(payload[i], scale)));
}

// Stores a block and its scale. `random` null: to nearest.
template <class Payload, bool kRoot>
void store_payloads(const float *x, const uint16_t *random, void *to, float *scale) {
  auto *payload = (typename Payload::Type *)to;
  int32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const auto magnitude = (int32_t)(kRoot ? statestream::finite_square(x[i]) : statestream::finite_magnitude(x[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint32_t bits = kRoot ? statestream::root_scale_bits<Payload>((uint32_t)largest)
                              : statestream::scale_bits<Payload>((uint32_t)largest, false);
  const float inverse = statestream::inverse_scale(bits);
  *scale = statestream::float_of(bits);
  if (random)
    for (int i = 0; i < kBlock; ++i)
      payload[i] =
          (typename Payload::Type)(kRoot ? statestream::root_payload_store<Payload, true>(x[i], inverse, random[i])
                                         : statestream::payload_store<Payload, true>(x[i], inverse, random[i]));
  else
    for (int i = 0; i < kBlock; ++i)
      payload[i] = (typename Payload::Type)(kRoot ? statestream::root_payload_store<Payload, false>(x[i], inverse, 0)
                                                  : statestream::payload_store<Payload, false>(x[i], inverse, 0));
}

void store_float16(const float *x, uint16_t *to) {
  for (int i = 0; i < kBlock; ++i) to[i] = statestream::float16_store_bits(x[i]);
}

void store_bfloat16_randomly(const float *x, const uint16_t *random, uint16_t *to) {
  for (int i = 0; i < kBlock; ++i) to[i] = statestream::bfloat16_stochastic_bits(x[i], random[i]);
}

}  // namespace
