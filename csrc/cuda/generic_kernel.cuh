// The device side of the steps that no kernel of adam_kernel.cuh takes: every other combination of formats,
// and random rounding. One kernel looks at the formats as it runs.
//
// A warp has a block of 256 elements, a lane eight of them that follow each other: the largest magnitude of
// a scaled block is one instruction. Nothing else passes between threads.
#pragma once
#include "../adam_rule.h"
#include "../tensor_table.h"
#include "elements.cuh"

namespace statestream {

constexpr int kGenericThreads = 128;
constexpr int kGenericMinBlocks = 5;
constexpr int kGenericWarps = kGenericThreads / kWarpLanes;
// A thread block's piece of a tensor: eight blocks for each of its warps.
constexpr int kGenericRounds = 8;
constexpr int kGenericBlockElements = kGenericRounds * kGenericWarps * (int)kScaleBlock;

struct GenericRow {
  uint64_t param, grad, exp_avg, exp_avg_sq, master;  // bytes 0, 8, 16, 24, 32
  int64_t numel;                                      // byte 40
  RowExtras extras;                                   // byte 48
  const AdamScalars<float> *device_scalars;           // byte 144: formed by step_kernel; null: `scalars`
  const float *device_step;                           // byte 152: the counter, where device_scalars is
  AdamScalars<float> scalars;                         // byte 160
  float step;                                         // byte 196
  int32_t first_chunk;                                // byte 200: chunks of the rows before it in this launch
};
static_assert(sizeof(GenericRow) == 208, "documented layout");

constexpr int kMaxGenericRows = 157;

struct GenericParameters {
  const float *found_inf;           // byte 0: null, or not zero where nothing may be updated
  uint64_t seed;                    // byte 8
  TableFormats formats;             // byte 16
  int32_t random;                   // byte 36: flags of StochasticTensor
  int32_t rows, chunks;             // bytes 40, 44
  GenericRow row[kMaxGenericRows];  // byte 48
};
static_assert(sizeof(GenericParameters) == 48 + 208 * kMaxGenericRows, "documented layout");
static_assert(sizeof(GenericParameters) <= 32764, "the limit of kernel parameters");

struct FirstChunks {
  const GenericRow *row;
  STATESTREAM_DEVICE int32_t operator[](int32_t i) const { return row[i].first_chunk; }
};

// Random bits of the eight elements from number i of a row on, in their order.
STATESTREAM_DEVICE PhiloxBlock random_words(const RandomKey &key, const RowExtras &e, int64_t i) {
  Coordinates place = coordinates(e, i);
  const bool in_order = run_length(e, place, kVector) == kVector;
  PhiloxBlock bits{}, group{};
  uint64_t number = 0;
#pragma unroll 1
  for (int k = 0; k < kVector; ++k, advance(e, &place)) {
    const uint64_t index = global_index(e, place);
    if (k == 0 || index / kVector != number) {
      number = index / kVector;
      group = random_group(key, number);
    }
    // All eight are of one group, in its order.
    if (k == 0 && in_order && index % kVector == 0) return group;
    // In at the top: after eight the first has come down to the bottom.
    bits.word[0] = bits.word[0] >> 16 | bits.word[1] << 16;
    bits.word[1] = bits.word[1] >> 16 | bits.word[2] << 16;
    bits.word[2] = bits.word[2] >> 16 | bits.word[3] << 16;
    bits.word[3] = bits.word[3] >> 16 | random_bits(group, index) << 16;
  }
  return bits;
}

STATESTREAM_DEVICE void load_weight(const TableFormats &f, const GenericRow &row, int64_t i, int count, float scale,
                                    float (&p)[kVector]) {
  uint32_t words[kVector];
  if (f.master == kRemainder) {
    uint32_t low[kVector];
    load_format(kBFloat16, row.param, i, count, words);
    load_format(kRemainder, row.master, i, count, low);
    each(p, [&](int k) { return join_master((uint16_t)half_of(words, k), (uint16_t)half_of(low, k)); });
  } else {
    const int32_t format = f.master ? f.master : f.param;
    load_format(format, f.master ? row.master : row.param, i, count, words);
    numbers_of<WeightStream>(format, words, scale, p);
  }
}

STATESTREAM_DEVICE void store_weight(const TableFormats &f, const GenericRow &row, int64_t i, int count, int lane,
                                     float *master_scale, bool nan, bool stochastic, const PhiloxBlock &random,
                                     float (&p)[kVector]) {
  uint32_t words[kVector];
  if (f.master == kRemainder) {
    uint32_t low[kVector];
#pragma unroll
    for (int k = 0; k < kVector; k += 2) {
      const uint32_t u[2] = {float32_store_bits(p[k]), float32_store_bits(p[k + 1])};
      words[k / 2] = (u[0] + 0x8000u) >> 16 | ((u[1] + 0x8000u) & 0xffff0000u);
      low[k / 2] = (u[0] & 0xffffu) | u[1] << 16;
    }
    store_format(kBFloat16, row.param, i, count, words);
    store_format(kRemainder, row.master, i, count, low);
    return;
  }
  if (f.master) {
    const float scale = words_of<MasterStream>(f.master, p, nan, false, random, lane, master_scale, words);
    store_format(f.master, row.master, i, count, words);
    // The parameter is its master as stored, rounded: one that is not was written from outside.
    if (is_scaled(f.master)) numbers_of<MasterStream>(f.master, words, scale, p);
  }
  words_of<ParamStream>(f.param, p, nan, stochastic, random, lane, nullptr, words);
  store_format(f.param, row.param, i, count, words);
}

// The block from element `block` on, by a warp.
STATESTREAM_DEVICE void update_block(const GenericParameters &a, const GenericRow &row, int64_t block, int lane) {
  const TableFormats &f = a.formats;
  const RowExtras &e = row.extras;
  const int64_t i = block + lane * kVector;
  const int count = i + kVector <= row.numel ? kVector : i < row.numel ? (int)(row.numel - i) : 0;
  const float scale1 = is_scaled(f.exp_avg) ? load_scale(scale_of(e.exp_avg_scale, block), lane) : 1.0f;
  const float scale2 = is_scaled(f.exp_avg_sq) ? load_scale(scale_of(e.exp_avg_sq_scale, block), lane) : 1.0f;
  const float master_scale = is_scaled(f.master) ? load_scale(scale_of(e.master_scale, block), lane) : 1.0f;
  // Loads before uses.
  uint32_t grad[kVector], exp_avg[kVector], exp_avg_sq[kVector];
  load_format(f.grad, row.grad, i, count, grad);
  load_format(f.exp_avg, row.exp_avg, i, count, exp_avg);
  load_format(f.exp_avg_sq, row.exp_avg_sq, i, count, exp_avg_sq);
  float p[kVector], g[kVector], m[kVector], v[kVector];
  load_weight(f, row, i, count, master_scale, p);
  numbers_of<GradStream>(f.grad, grad, 1.0f, g);
  numbers_of<ExpAvgStream>(f.exp_avg, exp_avg, scale1, m);
  numbers_of<ExpAvgSqStream>(f.exp_avg_sq, exp_avg_sq, scale2, v);

  const AdamScalars<float> s = row.device_scalars ? *row.device_scalars : row.scalars;
  const bool roots = is_scaled(f.exp_avg_sq);
  const auto update = [&](auto long_memory) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float root = adam_update<decltype(long_memory)::value>(p[k], g[k], m[k], v[k], s);
      v[k] = roots ? root : v[k];
    }
  };
  if (s.short1 || s.short2)
    update(std::false_type());
  else
    update(std::true_type());
  const bool nan = any_nan(p);  // one in m or v has reached p

  PhiloxBlock random{};
  const auto draw = [&](StochasticTensor tensor) {
    const bool draws = a.random >> tensor & 1;
    if (draws) {
      const float step = row.device_scalars ? *row.device_step : row.step;
      random = random_words(random_key(a.seed, (uint32_t)e.ordinal, tensor, step), e, i);
    }
    return draws;
  };
  uint32_t words[kVector];
  bool draws = draw(kParamBits);
  store_weight(f, row, i, count, lane, scale_of(e.master_scale, block), nan, draws, random, p);
  draws = draw(kExpAvgBits);
  words_of<ExpAvgStream>(f.exp_avg, m, nan, draws, random, lane, scale_of(e.exp_avg_scale, block), words);
  store_format(f.exp_avg, row.exp_avg, i, count, words);
  draws = draw(kExpAvgSqBits);
  words_of<ExpAvgSqStream>(f.exp_avg_sq, v, nan, draws, random, lane, scale_of(e.exp_avg_sq_scale, block), words);
  store_format(f.exp_avg_sq, row.exp_avg_sq, i, count, words);
}

static __global__ void __launch_bounds__(kGenericThreads, kGenericMinBlocks)
    generic_kernel(const GenericParameters __grid_constant__ a) {
  if (a.found_inf && *a.found_inf != 0.0f) return;
  const int lane = (int)threadIdx.x % kWarpLanes, warp = (int)threadIdx.x / kWarpLanes;
  // Fewer registers than 64 bits: both counts are below 2^31.
  for (uint32_t chunk = blockIdx.x; chunk < (uint32_t)a.chunks; chunk += gridDim.x) {
    const GenericRow &row = a.row[row_of_chunk(FirstChunks{a.row}, a.rows, chunk)];
    int64_t block = (int64_t)((int32_t)chunk - row.first_chunk) * kGenericBlockElements + warp * kScaleBlock;
    for (int round = 0; round < kGenericRounds && block < row.numel; ++round, block += kGenericWarps * kScaleBlock)
      update_block(a, row, block, lane);
  }
}

}  // namespace statestream
