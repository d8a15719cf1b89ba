// One kernel for random rounding, and for every combination of formats that isa_kernels.h has no kernel for. It decodes
// a block of 256 elements to FP32 on the stack, updates it as the other kernels do, and encodes it.
#pragma once
#include "block_formats.h"
#include "random_runs.h"

namespace {

using statestream::GenericCall;

// Addresses of a block's first elements and of its scales; null where there is none.
struct BlockStreams {
  char *param, *grad, *exp_avg, *exp_avg_sq, *master;
  float *exp_avg_scale, *exp_avg_sq_scale, *master_scale;
};

// Random bits of the three tensors; null: to nearest.
struct BlockRandom {
  const uint16_t *exp_avg, *exp_avg_sq, *param;
};

struct GenericKernel {
  // Where a block's FP32 numbers are: in place, or decoded into `scratch`.
  template <bool kRoot = false>
  static float *loaded(int32_t format, char *from, const float *scale, float *scratch) {
    float *x = scratch;
    with_format<statestream::kAnyRole>(format, [&](auto f) {
      if constexpr (statestream::is_scaled(f.kCode)) {
        load_payloads<PayloadOf<f.kCode>, kRoot>(from, *scale, scratch);
      } else if constexpr (f.kCode == statestream::kFloat16) {
        load_payloads<Float16Payload, false>(from, 1.0f, scratch);
      } else if constexpr (f.kCode == statestream::kBFloat16) {
        for (int i = 0; i < kBlock; i += kWidth) store_float32(scratch + i, load_bfloat16((uint16_t *)from + i));
      } else {
        static_assert(f.kCode == statestream::kFloat32);
        x = (float *)from;
      }
    });
    return x;
  }

  // Stores the numbers from where `loaded` put them.
  template <bool kRoot = false>
  static void store(int32_t format, const float *x, const uint16_t *random, char *to, float *scale) {
    with_format<statestream::kAnyRole>(format, [&](auto f) {
      if constexpr (statestream::is_scaled(f.kCode)) {
        store_payloads<PayloadOf<f.kCode>, kRoot>(x, random, to, scale);
      } else if constexpr (f.kCode == statestream::kFloat16) {
        store_float16(x, (uint16_t *)to);
      } else if constexpr (f.kCode == statestream::kBFloat16) {
        if (random) return store_bfloat16_randomly(x, random, (uint16_t *)to);
        for (int i = 0; i < kBlock; i += kWidth) store_bfloat16((uint16_t *)to + i, load_float32(x + i));
      } else {
        static_assert(f.kCode == statestream::kFloat32);
      }
    });
  }

  static float *loaded_weight(const TableFormats &f, const BlockStreams &a, float *scratch) {
    if (f.master == statestream::kNone) return loaded(f.param, a.param, nullptr, scratch);
    if (f.master != statestream::kRemainder) return loaded(f.master, a.master, a.master_scale, scratch);
    for (int i = 0; i < kBlock; i += kWidth)
      store_float32(scratch + i, join_masters((uint16_t *)a.param + i, (uint16_t *)a.master + i));
    return scratch;
  }

  static void store_weight(const TableFormats &f, float *p, const uint16_t *random, const BlockStreams &a) {
    if (f.master == statestream::kRemainder) {
      for (int i = 0; i < kBlock; i += kWidth)
        split_masters((uint16_t *)a.param + i, (uint16_t *)a.master + i, load_float32(p + i));
      return;
    }
    if (f.master != statestream::kNone) store(f.master, p, nullptr, a.master, a.master_scale);
    // The parameter is its master as stored, rounded: one that is not was written from outside.
    if (statestream::is_scaled(f.master)) loaded(f.master, a.master, a.master_scale, p);
    store(f.param, p, random, a.param, nullptr);
  }

  static void update_block(const TableFormats &f, const BlockStreams &a, const BlockRandom &random,
                           const AdamScalars<Vector> &s) {
    alignas(64) float scratch[4][kBlock];
    float *p = loaded_weight(f, a, scratch[0]);
    const float *g = loaded(f.grad, a.grad, nullptr, scratch[1]);
    float *m = loaded(f.exp_avg, a.exp_avg, a.exp_avg_scale, scratch[2]);
    float *v = loaded<true>(f.exp_avg_sq, a.exp_avg_sq, a.exp_avg_sq_scale, scratch[3]);
    for (int i = 0; i < kBlock; i += kWidth) {
      Vector weight = load_float32(p + i), exp_avg = load_float32(m + i), exp_avg_sq = load_float32(v + i);
      statestream::adam_update(weight, load_float32(g + i), exp_avg, exp_avg_sq, s);
      store_float32(p + i, weight);
      store_float32(m + i, exp_avg);
      store_float32(v + i, exp_avg_sq);
    }
    store_weight(f, p, random.param, a);
    store(f.exp_avg, m, random.exp_avg, a.exp_avg, a.exp_avg_scale);
    store<true>(f.exp_avg_sq, v, random.exp_avg_sq, a.exp_avg_sq, a.exp_avg_sq_scale);
  }

  // Fewer than a block: through copies padded with zeros, which stay zeros and so count in no scale.
  static void update_short_block(const TableFormats &f, const BlockStreams &a, const BlockRandom &random,
                                 const AdamScalars<Vector> &s, int64_t n) {
    alignas(64) char padded[5][kBlock * 4] = {};
    char *const streams[] = {a.param, a.exp_avg, a.exp_avg_sq, a.master, a.grad};  // what is only read comes last
    const int32_t formats[] = {f.param, f.exp_avg, f.exp_avg_sq, f.master, f.grad};
    for (int k = 0; k < 5; ++k)
      if (formats[k] != statestream::kNone) memcpy(padded[k], streams[k], n * statestream::format_bytes(formats[k]));
    const BlockStreams copies{padded[0], padded[4],       padded[1],          padded[2],
                              padded[3], a.exp_avg_scale, a.exp_avg_sq_scale, a.master_scale};
    update_block(f, copies, random, s);
    for (int k = 0; k < 4; ++k)
      if (formats[k] != statestream::kNone) memcpy(streams[k], padded[k], n * statestream::format_bytes(formats[k]));
  }

  static char *at(uint64_t address, int32_t format, int64_t i) {
    return (char *)(address + (uint64_t)(i * statestream::format_bytes(format)));
  }

  static float *scale_at(uint64_t address, int64_t i) { return (float *)(address + (uint64_t)i / kBlock * 4); }

  static void range(const GenericCall &call, const TensorRow &row, const RowExtras *extras,
                    const AdamScalars<float> &scalars, int64_t begin, int64_t end) {
    static const RowExtras kNoExtras = {};
    const RowExtras &e = extras ? *extras : kNoExtras;
    const TableFormats &f = call.formats;
    const AdamScalars<Vector> s = splat_scalars(scalars);
    const float step = *(const float *)row.step;
    const int32_t flags = statestream::random_flags(f, call.stochastic);
    uint16_t drawn[3][kBlock] = {};
    const uint16_t *random[3] = {};
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = end - i < kBlock ? end - i : kBlock;
      for (int tensor = 0; tensor < 3; ++tensor) {
        if (!(flags >> tensor & 1)) continue;
        const RandomKey key = statestream::random_key(call.seed, (uint32_t)e.ordinal, tensor, step);
        random_block(e, key, i, n, drawn[tensor]);
        random[tensor] = drawn[tensor];
      }
      const BlockStreams a{at(row.param, f.param, i),       at(row.grad, f.grad, i),
                           at(row.exp_avg, f.exp_avg, i),   at(row.exp_avg_sq, f.exp_avg_sq, i),
                           at(row.master, f.master, i),     scale_at(e.exp_avg_scale, i),
                           scale_at(e.exp_avg_sq_scale, i), scale_at(e.master_scale, i)};
      const BlockRandom bits{random[statestream::kExpAvgBits], random[statestream::kExpAvgSqBits],
                             random[statestream::kParamBits]};
      if (n == kBlock)
        update_block(f, a, bits, s);
      else
        update_short_block(f, a, bits, s, n);
    }
  }
};

}  // namespace
