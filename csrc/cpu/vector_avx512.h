// Sixteen floats in a 512-bit register. With __AVX512BF16__ the processor rounds to BF16 itself.
#pragma once
#include <immintrin.h>

#include "../number_formats.h"

namespace {

struct Vector {
  static constexpr int kWidth = 16;
  __m512 x;
};

#define STATESTREAM_INLINE inline __attribute__((always_inline))

STATESTREAM_INLINE Vector splat(float a) { return {_mm512_set1_ps(a)}; }
STATESTREAM_INLINE Vector rn_mul(Vector a, Vector b) { return {_mm512_mul_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_sub(Vector a, Vector b) { return {_mm512_sub_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_div(Vector a, Vector b) { return {_mm512_div_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_sqrt(Vector a) { return {_mm512_sqrt_ps(a.x)}; }
STATESTREAM_INLINE Vector rn_fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
STATESTREAM_INLINE Vector rn_fms(Vector a, Vector b, Vector c) { return {_mm512_fmsub_ps(a.x, b.x, c.x)}; }
STATESTREAM_INLINE Vector rn_fnma(Vector a, Vector b, Vector c) { return {_mm512_fnmadd_ps(a.x, b.x, c.x)}; }

STATESTREAM_INLINE __m512i canonical_bits(Vector a) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_castps_si512(a.x), nan, _mm512_set1_epi32(statestream::kQuietNan));
}
STATESTREAM_INLINE void store_words(uint16_t *to, __m512i words) {
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(words));
}
STATESTREAM_INLINE __m512i load_words(const uint16_t *from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

STATESTREAM_INLINE Vector load_float32(const float *from) { return {_mm512_loadu_ps(from)}; }
STATESTREAM_INLINE void store_float32(float *to, Vector a) { _mm512_storeu_si512(to, canonical_bits(a)); }

STATESTREAM_INLINE Vector load_bfloat16(const uint16_t *from) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(load_words(from), 16))};
}
STATESTREAM_INLINE void store_bfloat16(uint16_t *to, Vector a) {
#if defined(__AVX512BF16__)
  // The instruction flushes denormals and keeps NaN payloads: vectors that hold either go the integer way.
  constexpr int kQuietNanClass = 0x01, kDenormalClass = 0x20, kSignallingNanClass = 0x80;
  if (__builtin_expect(!_mm512_fpclass_ps_mask(a.x, kQuietNanClass | kDenormalClass | kSignallingNanClass), 1)) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(a.x));
    return;
  }
#endif
  const __m512i u = canonical_bits(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  store_words(to, _mm512_srli_epi32(up, 16));
}

STATESTREAM_INLINE Vector join_masters(const uint16_t *weight, const uint16_t *low) {
  const __m512i w = load_words(weight), l = load_words(low);
  const __mmask16 up = _mm512_test_epi32_mask(l, _mm512_set1_epi32(0x8000));
  const __m512i magnitude = _mm512_and_si512(w, _mm512_set1_epi32(0x7fff));
  const __mmask16 zero = _mm512_testn_epi32_mask(magnitude, magnitude);
  const __mmask16 infinite = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f80));
  const __mmask16 impossible = (up & zero) | (~up & infinite);
  const __m512i high = _mm512_slli_epi32(w, 16);
  __m512i joined = _mm512_mask_sub_epi32(high, up, high, _mm512_set1_epi32(0x10000));
  joined = _mm512_add_epi32(joined, l);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(joined, impossible, high))};
}
STATESTREAM_INLINE void split_masters(uint16_t *weight, uint16_t *low, Vector a) {
  const __m512i u = canonical_bits(a);
  store_words(weight, _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16));
  store_words(low, u);
}

}  // namespace
