// The scalar functions of csrc's headers over arrays, for ctypes (scalar_formats.py).
#include "random_bits.h"
#include "scaled_formats.h"
#include "tensor_table.h"

using namespace statestream;

namespace {

template <class Payload>
void load(bool root, const uint32_t *payload, const float *scale, float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = root ? root_load<Payload>(payload[i], scale[i]) : scaled_load<Payload>(payload[i], scale[i]);
}

template <class Payload>
void store(bool root, const float *x, const float *scale, const uint32_t *random, uint32_t *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float inverse = inverse_scale(bits_of(scale[i]));
    if (random)
      out[i] = root ? root_payload_store<Payload, true>(x[i], inverse, random[i])
                    : payload_store<Payload, true>(x[i], inverse, random[i]);
    else
      out[i] =
          root ? root_payload_store<Payload, false>(x[i], inverse, 0) : payload_store<Payload, false>(x[i], inverse, 0);
  }
}

template <class Payload>
void scales(bool root, const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = float_of(root ? root_scale_bits<Payload>(finite_square(x[i]))
                           : scale_bits<Payload>(finite_magnitude(x[i]), false));
}

}  // namespace

extern "C" {

void scaled_load_all(int bits, int root, const uint32_t *payload, const float *scale, float *out, int64_t n) {
  (bits == 8 ? load<Float8Payload> : load<Float16Payload>)(root, payload, scale, out, n);
}

// `random` null: to nearest.
void scaled_store_all(int bits, int root, const float *x, const float *scale, const uint32_t *random, uint32_t *out,
                      int64_t n) {
  (bits == 8 ? store<Float8Payload> : store<Float16Payload>)(root, x, scale, random, out, n);
}

// The scale of a block whose largest is x.
void scale_all(int bits, int root, const float *x, float *out, int64_t n) {
  (bits == 8 ? scales<Float8Payload> : scales<Float16Payload>)(root, x, out, n);
}

void float16_store_all(const float *x, uint32_t *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float16_store_bits(x[i]);
}

void bfloat16_stochastic_all(const float *x, const uint32_t *random, uint32_t *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bfloat16_stochastic_bits(x[i], random[i]);
}

void philox(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
  const PhiloxBlock block = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  for (int k = 0; k < 4; ++k) out[k] = block.word[k];
}

void random_all(uint64_t seed, uint32_t ordinal, int32_t tensor, float step, const uint64_t *global, uint32_t *out,
                int64_t n) {
  const RandomKey key = random_key(seed, ordinal, tensor, step);
  for (int64_t i = 0; i < n; ++i) out[i] = random_bits(random_group(key, global[i] >> 3), global[i]);
}

void global_all(const RowExtras *row, int64_t *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = global_index(*row, i);
}
}
