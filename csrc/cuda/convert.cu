// Converts slices of state to FP32 and back, for export and load, and sets masters to changed weights.
#include "generic.h"
#include "launch.h"
#include "vectors.cuh"

namespace statestream {
namespace {

constexpr int kThreads = 256;
constexpr int kUnalignable = -1;

struct ConvertParameters {
  uint64_t from, to;  // bytes 0, 8
  int64_t n;          // byte 16
  int64_t head;       // byte 24: elements before both are 16-byte aligned, or kUnalignable
};

template <class From, class To>
struct Convert {
  using FromType = typename From::Type;
  using ToType = typename To::Type;

  STATESTREAM_DEVICE static void vector(const FromType *from, ToType *to) {
    float x[kVector];
    From::load(from, x);
    To::store(to, x, any_nan(x));
  }
  STATESTREAM_DEVICE static void one(const FromType *from, ToType *to) { To::store_one(to, From::load_one(from)); }
};

struct Refresh {
  using FromType = uint16_t;
  using ToType = float;

  STATESTREAM_DEVICE static void vector(const uint16_t *weight, float *master) {
    float w[kVector], x[kVector];
    BFloat16::load(weight, w);
    Float32::load(master, x);
    bool changed = false;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const bool differs = (uint32_t)bfloat16_store_bits(x[k]) << 16 != bits_of(w[k]);
      x[k] = differs ? w[k] : x[k];
      changed |= differs;
    }
    if (changed) Float32::store(master, x, false);
  }
  STATESTREAM_DEVICE static void one(const uint16_t *weight, float *master) {
    if (bfloat16_store_bits(*master) != *weight) *master = bfloat16_load(*weight);
  }
};

template <class Work>
__global__ void __launch_bounds__(kThreads) convert_kernel(const ConvertParameters __grid_constant__ a) {
  const auto *from = (const typename Work::FromType *)a.from;
  auto *to = (typename Work::ToType *)a.to;
  const int64_t thread = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t threads = (int64_t)gridDim.x * kThreads;
  if (a.head == kUnalignable) {
    for (int64_t i = thread; i < a.n; i += threads) Work::one(from + i, to + i);
    return;
  }
  for (int64_t i = a.head + thread * kVector; i + kVector <= a.n; i += threads * kVector)
    Work::vector(from + i, to + i);
  const int64_t tail = a.n - (a.n - a.head) % kVector;
  if (thread < a.head) Work::one(from + thread, to + thread);
  if (tail + thread < a.n) Work::one(from + tail + thread, to + tail + thread);
}

template <class Work>
void convert(const void *from, void *to, int64_t n, const Place &place) {
  if (!n) return;
  set_device(place.device);
  ConvertParameters a{(uint64_t)from, (uint64_t)to, n, kUnalignable};
  for (int64_t i = kVector - 1; i >= 0; --i)
    if ((a.from + i * sizeof(typename Work::FromType)) % 16 == 0 &&
        (a.to + i * sizeof(typename Work::ToType)) % 16 == 0)
      a.head = std::min(i, n);
  const auto kernel = convert_kernel<Work>;
  const int64_t wanted = chunks_of(n, kThreads * kVector);
  launch(kernel, std::min(wanted, resident_blocks(kernel, kThreads)), kThreads, a, place);
}

}  // namespace

bool has_format(int32_t format, bool root) {
  return with_format<kState>(format, [](auto) {}) && (is_scaled(format) || !root);
}

void decode(int32_t format, const void *from, float *to, int64_t n, const Place &place, uint64_t scale, bool root) {
  with_format<kState>(format, [&](auto f) {
    if constexpr (is_scaled(f.kCode))
      generic_convert({(uint64_t)from, (uint64_t)to, scale, GenericConversion::kDecode, format, kNone, root}, n, place);
    else
      convert<Convert<VectorsOf<f.kCode>, Float32>>(from, to, n, place);
  });
}

void encode(int32_t format, const float *from, void *to, int64_t n, const Place &place, uint64_t scale, bool root) {
  with_format<kState>(format, [&](auto f) {
    if constexpr (is_scaled(f.kCode))
      generic_convert({(uint64_t)from, (uint64_t)to, scale, GenericConversion::kEncode, format, kNone, root}, n, place);
    else
      convert<Convert<Float32, VectorsOf<f.kCode>>>(from, to, n, place);
  });
}

bool has_master(int32_t param_format, int32_t master_format) {
  return master_format != kRemainder && is_master_of(param_format, master_format);
}

void refresh_master(const void *weight, void *master, int64_t n, const Place &place, int32_t param_format,
                    int32_t master_format, uint64_t scale) {
  if (param_format == kBFloat16 && master_format == kFloat32) return convert<Refresh>(weight, master, n, place);
  const auto from = (uint64_t)weight, to = (uint64_t)master;
  generic_convert({from, to, scale, GenericConversion::kRefresh, master_format, param_format, 0}, n, place);
}

}  // namespace statestream
