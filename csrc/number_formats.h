// How numbers are stored, and the IEEE operations that the update is made of, for host and device.
//
// Every operation rounds to nearest even and is written out: builds use -ffp-contract=off and
// -fmad=false, so nothing fuses that is not an rn_fma here. Whatever is stored as NaN is stored as
// the quiet NaN 0x7fc00000 (bfloat16: 0x7fc0), because hardware disagrees on a NaN's payload.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define STATESTREAM_HD static __host__ __device__ __forceinline__
#else
#define STATESTREAM_HD static inline __attribute__((always_inline))
#endif

namespace statestream {

// What a tensor may be to an optimizer.
enum FormatRole : int32_t { kParameter = 1, kGradient = 2, kMoment = 4, kMaster = 8 };
constexpr int32_t kState = kMoment | kMaster, kAnyRole = kState | kParameter | kGradient;

// How DLPack calls kinds of numbers.
enum DlPackType : uint8_t { kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4 };

// The list of storage formats: name, code, DLPack's type of the tensor, bytes an element, whether payloads have a
// float32 scale for each block of kScaleBlock elements, roles. python/statestream/formats.py has the same table.
// A scaled format's conversions follow from its Payload (scaled_formats.h). Of another format a conversion is written
// in cpu/generic_kernel.h and cuda/elements.cuh, and as VectorsOf where it is a state; without one nothing compiles.
// A remainder is the low 16 bits of an FP32 master whose high half is the BF16 parameter.
#define STATESTREAM_FORMATS(X)                                                   \
  X(kFloat32, 1, kDlFloat, 4, false, kParameter | kGradient | kMoment | kMaster) \
  X(kBFloat16, 2, kDlBfloat, 2, false, kParameter | kGradient | kMoment)         \
  X(kRemainder, 3, kDlInt, 2, false, kMaster)                                    \
  X(kFloat16, 4, kDlFloat, 2, false, kParameter | kGradient)                     \
  X(kScaledFloat16, 5, kDlFloat, 2, true, kMoment | kMaster)                     \
  X(kScaledFloat8, 6, kDlUint, 1, true, kMoment)

enum Format : int32_t {
  kNone = 0,
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) name = code,
  STATESTREAM_FORMATS(STATESTREAM_ONE)
#undef STATESTREAM_ONE
      kFormatCodes  // all are below
};
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) static_assert(code > 0 && code < kFormatCodes, #name);
STATESTREAM_FORMATS(STATESTREAM_ONE)
#undef STATESTREAM_ONE

constexpr int64_t kScaleBlock = 256;

STATESTREAM_HD constexpr bool is_scaled(int32_t format) {
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) || (scaled && format == name)
  return false STATESTREAM_FORMATS(STATESTREAM_ONE);
#undef STATESTREAM_ONE
}

STATESTREAM_HD bool has_role(int32_t format, FormatRole role) {
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) || (((roles) & role) && format == name)
  return false STATESTREAM_FORMATS(STATESTREAM_ONE);
#undef STATESTREAM_ONE
}

STATESTREAM_HD int64_t scale_blocks(int64_t numel) { return numel / kScaleBlock + (numel % kScaleBlock != 0); }

STATESTREAM_HD bool has_bytes(int32_t format, int64_t wanted) {
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) || (bytes == wanted && format == name)
  return false STATESTREAM_FORMATS(STATESTREAM_ONE);
#undef STATESTREAM_ONE
}

// Three comparisons: a case for each format makes the generic kernels longer.
STATESTREAM_HD int64_t format_bytes(int32_t format) {
  return has_bytes(format, 1) ? 1 : has_bytes(format, 2) ? 2 : has_bytes(format, 4) ? 4 : 0;
}

// A format that is known to the compiler.
template <int32_t kFormat>
struct FormatTag {
  static constexpr int32_t kCode = kFormat;
};

// Calls work(FormatTag) if the format has one of the roles, and returns whether it has. Remainders are left out: they
// are numbers only together with their parameter. `work` is compiled for these formats and no others.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `work` runs where the caller runs
#endif
template <int32_t kRoles, bool kOnlyScaled = false, class Work>
STATESTREAM_HD bool with_format(int32_t format, const Work &work) {
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles)                            \
  if constexpr (((roles) & kRoles) != 0 && name != kRemainder && (scaled || !kOnlyScaled)) { \
    if (format == name) return work(FormatTag<name>()), true;                                \
  }
  STATESTREAM_FORMATS(STATESTREAM_ONE)
#undef STATESTREAM_ONE
  return false;
}

STATESTREAM_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
#endif
}

STATESTREAM_HD float float_of(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, 4);
  return x;
#endif
}

// a where `which`, else b. On the host by a mask: a branch, which ?: may become, keeps a loop from being
// vectorised.
STATESTREAM_HD uint32_t select_bits(bool which, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return which ? a : b;
#else
  const uint32_t mask = 0u - (uint32_t)which;
  return (a & mask) | (b & ~mask);
#endif
}

#if defined(__CUDA_ARCH__)
STATESTREAM_HD float rn_mul(float a, float b) { return __fmul_rn(a, b); }
STATESTREAM_HD float rn_add(float a, float b) { return __fadd_rn(a, b); }
STATESTREAM_HD float rn_sub(float a, float b) { return __fsub_rn(a, b); }
STATESTREAM_HD float rn_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
STATESTREAM_HD float rn_fms(float a, float b, float c) { return __fmaf_rn(a, b, -c); }
STATESTREAM_HD float rn_fnma(float a, float b, float c) { return __fmaf_rn(-a, b, c); }
// Zeros go round the instructions' slow paths, which whole rows of untouched weights would take. Any
// dividend does that neither overflows on a denormal b nor leaves the fast path: its quotient times
// zero is 0 / b, for b of 0, infinity and NaN too.
STATESTREAM_HD float rn_div(float a, float b) {
  const float quotient = __fdiv_rn(a == 0.0f ? 0x1p-24f : a, b);
  return a == 0.0f ? __fmul_rn(quotient, a) : quotient;
}
STATESTREAM_HD float rn_sqrt(float a) {
  const float root = __fsqrt_rn(a == 0.0f ? 1.0f : a);
  return a == 0.0f ? a : root;
}
#else
STATESTREAM_HD float rn_mul(float a, float b) { return a * b; }
STATESTREAM_HD float rn_add(float a, float b) { return a + b; }
STATESTREAM_HD float rn_sub(float a, float b) { return a - b; }
STATESTREAM_HD float rn_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
STATESTREAM_HD float rn_fms(float a, float b, float c) { return __builtin_fmaf(a, b, -c); }
STATESTREAM_HD float rn_fnma(float a, float b, float c) { return __builtin_fmaf(-a, b, c); }
STATESTREAM_HD float rn_div(float a, float b) { return a / b; }
STATESTREAM_HD float rn_sqrt(float a) { return __builtin_sqrtf(a); }
#endif

constexpr uint32_t kQuietNan = 0x7fc00000u;

STATESTREAM_HD bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

// FP32 as it is stored: itself, any NaN as the one quiet NaN.
STATESTREAM_HD uint32_t float32_store_bits(float x) {
  uint32_t u = bits_of(x);
  return is_nan_bits(u) ? kQuietNan : u;
}

// Round to nearest even; overflow goes to infinity.
STATESTREAM_HD uint16_t bfloat16_store_bits(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(is_nan_bits(u) ? 0x7fc0u : rounded);
}

STATESTREAM_HD float bfloat16_load(uint16_t b) { return float_of((uint32_t)b << 16); }

// An FP32 master as a BF16 weight and 16 low bits. The weight is the master rounded half up in
// magnitude (nearest-even plus 16 bits could not be inverted), so a low half >= 0x8000 says that the
// weight was rounded away from the master and one must be taken off again.
STATESTREAM_HD void split_master(float master, uint16_t *weight, uint16_t *low) {
  uint32_t u = float32_store_bits(master);
  *weight = (uint16_t)((u + 0x8000u) >> 16);
  *low = (uint16_t)u;
}

// The inverse, for every pair that split_master makes. Pairs that it cannot make appear when a
// weight is written from outside: zero with a rounded-up low half, infinity with any low half but a
// rounded-up one. Joining those bit by bit would give NaN, so the low half is dropped.
STATESTREAM_HD float join_master(uint16_t weight, uint16_t low) {
  uint32_t magnitude = weight & 0x7fffu;
  bool rounded_up = low & 0x8000u;
  bool impossible = rounded_up ? magnitude == 0 : magnitude == 0x7f80u;
  uint32_t joined = ((uint32_t)weight << 16) - (rounded_up ? 0x10000u : 0u) + low;
  return float_of(impossible ? (uint32_t)weight << 16 : joined);
}

}  // namespace statestream
