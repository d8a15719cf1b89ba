// Eight floats in a 256-bit register, with FMA3.
#pragma once
#include <immintrin.h>

#include "../number_formats.h"

namespace {

struct Vector {
  static constexpr int kWidth = 8;
  __m256 x;
};

#define STATESTREAM_INLINE inline __attribute__((always_inline))

STATESTREAM_INLINE Vector splat(float a) { return {_mm256_set1_ps(a)}; }
STATESTREAM_INLINE Vector rn_mul(Vector a, Vector b) { return {_mm256_mul_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_sub(Vector a, Vector b) { return {_mm256_sub_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_div(Vector a, Vector b) { return {_mm256_div_ps(a.x, b.x)}; }
STATESTREAM_INLINE Vector rn_sqrt(Vector a) { return {_mm256_sqrt_ps(a.x)}; }
STATESTREAM_INLINE Vector rn_fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
STATESTREAM_INLINE Vector rn_fms(Vector a, Vector b, Vector c) { return {_mm256_fmsub_ps(a.x, b.x, c.x)}; }
STATESTREAM_INLINE Vector rn_fnma(Vector a, Vector b, Vector c) { return {_mm256_fnmadd_ps(a.x, b.x, c.x)}; }

STATESTREAM_INLINE __m256i canonical_bits(Vector a) {
  const __m256 nan = _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(statestream::kQuietNan));
  return _mm256_castps_si256(_mm256_blendv_ps(a.x, quiet, nan));
}
// The low 16 bits of each of eight words; their high halves must be zero.
STATESTREAM_INLINE void store_words(uint16_t *to, __m256i words) {
  const __m256i packed = _mm256_packus_epi32(words, words);
  _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
STATESTREAM_INLINE __m256i load_words(const uint16_t *from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

STATESTREAM_INLINE Vector load_float32(const float *from) { return {_mm256_loadu_ps(from)}; }
STATESTREAM_INLINE void store_float32(float *to, Vector a) { _mm256_storeu_si256((__m256i *)to, canonical_bits(a)); }

STATESTREAM_INLINE Vector load_bfloat16(const uint16_t *from) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(from), 16))};
}
STATESTREAM_INLINE void store_bfloat16(uint16_t *to, Vector a) {
  const __m256i u = canonical_bits(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  store_words(to, _mm256_srli_epi32(up, 16));
}

STATESTREAM_INLINE Vector join_masters(const uint16_t *weight, const uint16_t *low) {
  const __m256i w = load_words(weight), l = load_words(low);
  const __m256i up = _mm256_cmpgt_epi32(l, _mm256_set1_epi32(0x7fff));
  const __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi32(0x7fff));
  const __m256i zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
  const __m256i infinite = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f80));
  const __m256i impossible = _mm256_blendv_epi8(infinite, zero, up);
  const __m256i high = _mm256_slli_epi32(w, 16);
  const __m256i borrow = _mm256_and_si256(up, _mm256_set1_epi32(0x10000));
  const __m256i joined = _mm256_add_epi32(_mm256_sub_epi32(high, borrow), l);
  return {_mm256_castsi256_ps(_mm256_blendv_epi8(joined, high, impossible))};
}
STATESTREAM_INLINE void split_masters(uint16_t *weight, uint16_t *low, Vector a) {
  const __m256i u = canonical_bits(a);
  store_words(weight, _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16));
  store_words(low, _mm256_and_si256(u, _mm256_set1_epi32(0xffff)));
}

}  // namespace
