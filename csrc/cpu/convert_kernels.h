// Converts states from and to FP32, and sets masters to changed weights, with the Vector that the including file chose.
#pragma once
#include "block_formats.h"

namespace {

// Formats that isa_kernels.h has vectors for ------------------------------------------------------------

template <class From, class To>
void convert_range(const typename From::Type *from, typename To::Type *to, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kPrefetched <= end; i += kPrefetched) {
    prefetch_ahead(from + i);
    for (int k = 0; k < kPrefetched; k += kWidth) To::store(to + i + k, From::load(from + i + k));
  }
  for (; i + kWidth <= end; i += kWidth) To::store(to + i, From::load(from + i));
  if (i == end) return;
  typename From::Type in[kWidth] = {};
  typename To::Type out[kWidth];
  const int64_t n = end - i;
  memcpy(in, from + i, n * sizeof *in);
  To::store(out, From::load(in));
  memcpy(to + i, out, n * sizeof *out);
}

template <class From>
void decode_range(const void *from, const float *, float *to, int64_t begin, int64_t end) {
  convert_range<From, Float32>((const typename From::Type *)from, to, begin, end);
}

template <class To>
void encode_range(const float *from, void *to, float *, int64_t begin, int64_t end) {
  convert_range<Float32, To>(from, (typename To::Type *)to, begin, end);
}

// Scaled formats, a block at a time; `begin` is on a block's edge -------------------------------------------

// Calls work(first element, elements of the block) for each block.
template <class Work>
STATESTREAM_INLINE void over_blocks(int64_t begin, int64_t end, const Work &work) {
  for (int64_t i = begin; i < end; i += kBlock) work(i, end - i < kBlock ? end - i : kBlock);
}

template <class Payload, bool kRoot>
void decode_scaled_range(const void *from, const float *scale, float *to, int64_t begin, int64_t end) {
  const auto *payload = (const typename Payload::Type *)from;
  over_blocks(begin, end, [&](int64_t i, int64_t n) {
    if (n == kBlock) return load_payloads<Payload, kRoot>(payload + i, scale[i / kBlock], to + i);
    typename Payload::Type in[kBlock] = {};
    float out[kBlock];
    memcpy(in, payload + i, n * sizeof *in);
    load_payloads<Payload, kRoot>(in, scale[i / kBlock], out);
    memcpy(to + i, out, n * sizeof *out);
  });
}

template <class Payload, bool kRoot>
void encode_scaled_range(const float *from, void *to, float *scale, int64_t begin, int64_t end) {
  auto *payload = (typename Payload::Type *)to;
  over_blocks(begin, end, [&](int64_t i, int64_t n) {
    if (n == kBlock) return store_payloads<Payload, kRoot>(from + i, nullptr, payload + i, scale + i / kBlock);
    float in[kBlock] = {};
    typename Payload::Type out[kBlock];
    memcpy(in, from + i, n * sizeof *in);
    store_payloads<Payload, kRoot>(in, nullptr, out, scale + i / kBlock);
    memcpy(payload + i, out, n * sizeof *out);
  });
}

statestream::DecodeRange choose_decode(int32_t format, bool root) {
  statestream::DecodeRange chosen = nullptr;
  with_format<statestream::kState>(format, [&](auto f) {
    if constexpr (statestream::is_scaled(f.kCode))
      chosen = root ? decode_scaled_range<PayloadOf<f.kCode>, true> : decode_scaled_range<PayloadOf<f.kCode>, false>;
    else
      chosen = root ? nullptr : decode_range<VectorsOf<f.kCode>>;
  });
  return chosen;
}

statestream::EncodeRange choose_encode(int32_t format, bool root) {
  statestream::EncodeRange chosen = nullptr;
  with_format<statestream::kState>(format, [&](auto f) {
    if constexpr (statestream::is_scaled(f.kCode))
      chosen = root ? encode_scaled_range<PayloadOf<f.kCode>, true> : encode_scaled_range<PayloadOf<f.kCode>, false>;
    else
      chosen = root ? nullptr : encode_range<VectorsOf<f.kCode>>;
  });
  return chosen;
}

// Masters --------------------------------------------------------------------------------------------------

// Sets each master that does not round to its weight to the weight. Returns whether there was one.
template <int32_t kParam>
bool refresh_float32(const uint16_t *weight, float *master, int64_t n) {
  constexpr bool kIsBFloat16 = kParam == statestream::kBFloat16;
  static_assert(kIsBFloat16 || kParam == statestream::kFloat16);
  bool changed = false;
  for (int64_t i = 0; i < n; ++i) {
    const float x = master[i];
    if ((kIsBFloat16 ? statestream::bfloat16_store_bits(x) : statestream::float16_store_bits(x)) == weight[i]) continue;
    const uint16_t w = weight[i];
    master[i] = kIsBFloat16 ? statestream::bfloat16_load(w)
                            : statestream::float_of(statestream::float32_store_bits(statestream::float16_load(w)));
    changed = true;
  }
  return changed;
}

template <int32_t kParam>
void refresh_range(const void *weight, void *master, float *, int64_t begin, int64_t end) {
  refresh_float32<kParam>((const uint16_t *)weight + begin, (float *)master + begin, end - begin);
}

template <int32_t kParam, class Payload>
void refresh_scaled_range(const void *weight, void *master, float *scale, int64_t begin, int64_t end) {
  auto *payload = (typename Payload::Type *)master;
  over_blocks(begin, end, [&](int64_t i, int64_t n) {
    float x[kBlock];
    decode_scaled_range<Payload, false>(payload + i, scale + i / kBlock, x, 0, n);
    if (refresh_float32<kParam>((const uint16_t *)weight + i, x, n))
      encode_scaled_range<Payload, false>(x, payload + i, scale + i / kBlock, 0, n);
  });
}

statestream::RefreshRange choose_refresh(int32_t param, int32_t master) {
  statestream::RefreshRange chosen = nullptr;
  if (!statestream::is_master_of(param, master)) return chosen;
  with_format<statestream::kParameter>(param, [&](auto p) {
    with_format<statestream::kMaster>(master, [&](auto m) {
      if constexpr (p.kCode != statestream::kFloat32 && statestream::is_scaled(m.kCode))
        chosen = refresh_scaled_range<p.kCode, PayloadOf<m.kCode>>;
      else if constexpr (p.kCode != statestream::kFloat32)
        chosen = refresh_range<p.kCode>;
    });
  });
  return chosen;
}

}  // namespace
