// States from and to FP32, and masters from changed weights, over whichever Vector the including file chose.
#pragma once
#include "block_formats.h"

namespace {

// Formats that form_kernels.h has vectors for ------------------------------------------------------------

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
  switch (format) {
    case statestream::kFloat32: return root ? nullptr : decode_range<Float32>;
    case statestream::kBFloat16: return root ? nullptr : decode_range<BFloat16>;
    case statestream::kScaledFloat16:
      return root ? decode_scaled_range<Float16Payload, true> : decode_scaled_range<Float16Payload, false>;
    case statestream::kScaledFloat8:
      return root ? decode_scaled_range<Float8Payload, true> : decode_scaled_range<Float8Payload, false>;
    default: return nullptr;
  }
}

statestream::EncodeRange choose_encode(int32_t format, bool root) {
  switch (format) {
    case statestream::kFloat32: return root ? nullptr : encode_range<Float32>;
    case statestream::kBFloat16: return root ? nullptr : encode_range<BFloat16>;
    case statestream::kScaledFloat16:
      return root ? encode_scaled_range<Float16Payload, true> : encode_scaled_range<Float16Payload, false>;
    case statestream::kScaledFloat8:
      return root ? encode_scaled_range<Float8Payload, true> : encode_scaled_range<Float8Payload, false>;
    default: return nullptr;
  }
}

// Masters --------------------------------------------------------------------------------------------------

struct BFloat16Weight {
  STATESTREAM_INLINE static float load(uint16_t w) { return statestream::bfloat16_load(w); }
  STATESTREAM_INLINE static uint16_t store(float x) { return statestream::bfloat16_store_bits(x); }
};

struct Float16Weight {
  STATESTREAM_INLINE static float load(uint16_t w) {
    return statestream::float_of(statestream::float32_store_bits(statestream::float16_load(w)));
  }
  STATESTREAM_INLINE static uint16_t store(float x) { return statestream::float16_store_bits(x); }
};

// Whether any master was not the weight's, and now is.
template <class Weight>
bool refresh_float32(const uint16_t *weight, float *master, int64_t n) {
  bool changed = false;
  for (int64_t i = 0; i < n; ++i)
    if (Weight::store(master[i]) != weight[i]) {
      master[i] = Weight::load(weight[i]);
      changed = true;
    }
  return changed;
}

template <class Weight>
void refresh_range(const void *weight, void *master, float *, int64_t begin, int64_t end) {
  refresh_float32<Weight>((const uint16_t *)weight + begin, (float *)master + begin, end - begin);
}

template <class Weight>
void refresh_scaled_range(const void *weight, void *master, float *scale, int64_t begin, int64_t end) {
  auto *payload = (uint16_t *)master;
  over_blocks(begin, end, [&](int64_t i, int64_t n) {
    float x[kBlock];
    decode_scaled_range<Float16Payload, false>(payload + i, scale + i / kBlock, x, 0, n);
    if (refresh_float32<Weight>((const uint16_t *)weight + i, x, n))
      encode_scaled_range<Float16Payload, false>(x, payload + i, scale + i / kBlock, 0, n);
  });
}

template <class Weight>
statestream::RefreshRange choose_refresh_of(int32_t master) {
  switch (master) {
    case statestream::kFloat32: return refresh_range<Weight>;
    case statestream::kScaledFloat16: return refresh_scaled_range<Weight>;
    default: return nullptr;
  }
}

statestream::RefreshRange choose_refresh(int32_t param, int32_t master) {
  switch (param) {
    case statestream::kBFloat16: return choose_refresh_of<BFloat16Weight>(master);
    case statestream::kFloat16: return choose_refresh_of<Float16Weight>(master);
    default: return nullptr;
  }
}

}  // namespace
