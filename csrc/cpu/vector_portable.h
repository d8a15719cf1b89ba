// Eight floats in an array: any processor, and the compiler vectorises what it can.
#pragma once
#include "../number_formats.h"

namespace {

struct Vector {
  static constexpr int kWidth = 8;
  float x[kWidth];
};

#define STATESTREAM_INLINE inline __attribute__((always_inline))

template <class Lane>
STATESTREAM_INLINE Vector each(Lane lane) {
  Vector r;
  for (int k = 0; k < Vector::kWidth; ++k) r.x[k] = lane(k);
  return r;
}

STATESTREAM_INLINE Vector splat(float a) {
  return each([&](int) { return a; });
}
STATESTREAM_INLINE Vector rn_mul(const Vector &a, const Vector &b) {
  return each([&](int k) { return statestream::rn_mul(a.x[k], b.x[k]); });
}
STATESTREAM_INLINE Vector rn_sub(const Vector &a, const Vector &b) {
  return each([&](int k) { return statestream::rn_sub(a.x[k], b.x[k]); });
}
STATESTREAM_INLINE Vector rn_div(const Vector &a, const Vector &b) {
  return each([&](int k) { return statestream::rn_div(a.x[k], b.x[k]); });
}
STATESTREAM_INLINE Vector rn_sqrt(const Vector &a) {
  return each([&](int k) { return statestream::rn_sqrt(a.x[k]); });
}
STATESTREAM_INLINE Vector rn_fma(const Vector &a, const Vector &b, const Vector &c) {
  return each([&](int k) { return statestream::rn_fma(a.x[k], b.x[k], c.x[k]); });
}
STATESTREAM_INLINE Vector rn_fms(const Vector &a, const Vector &b, const Vector &c) {
  return each([&](int k) { return statestream::rn_fms(a.x[k], b.x[k], c.x[k]); });
}
STATESTREAM_INLINE Vector rn_fnma(const Vector &a, const Vector &b, const Vector &c) {
  return each([&](int k) { return statestream::rn_fnma(a.x[k], b.x[k], c.x[k]); });
}

STATESTREAM_INLINE Vector load_float32(const float *from) {
  return each([&](int k) { return from[k]; });
}
STATESTREAM_INLINE void store_float32(float *to, const Vector &a) {
  for (int k = 0; k < Vector::kWidth; ++k) to[k] = statestream::float_of(statestream::float32_store_bits(a.x[k]));
}
STATESTREAM_INLINE Vector load_bfloat16(const uint16_t *from) {
  return each([&](int k) { return statestream::bfloat16_load(from[k]); });
}
STATESTREAM_INLINE void store_bfloat16(uint16_t *to, const Vector &a) {
  for (int k = 0; k < Vector::kWidth; ++k) to[k] = statestream::bfloat16_store_bits(a.x[k]);
}
STATESTREAM_INLINE Vector join_masters(const uint16_t *weight, const uint16_t *low) {
  return each([&](int k) { return statestream::join_master(weight[k], low[k]); });
}
STATESTREAM_INLINE void split_masters(uint16_t *weight, uint16_t *low, const Vector &a) {
  for (int k = 0; k < Vector::kWidth; ++k) statestream::split_master(a.x[k], weight + k, low + k);
}

}  // namespace
