// The device side of the Adam step: what a launch is given, and the kernels.
//
// Every kernel takes one structure by value: its PTX has one parameter, laid out as below. Kernel
// parameters (up to 32,764 bytes) rather than a table in device memory: 1,000 tensors need two
// launches, and there is nothing to copy, to keep alive or to go stale in a CUDA graph.
#pragma once
#include "../adam_rule.h"
#include "../tensor_table.h"
#include "vectors.cuh"

namespace statestream {

constexpr int kThreads = 128;
// A register limit that all kernels meet without spilling.
constexpr int kMinBlocks = 5;
// A block's piece of a tensor: eight rounds of all its threads.
constexpr int kBlockElements = 8 * kThreads * kVector;
constexpr size_t kParameterBytes = 32764;

// Where one tensor is. `head` elements come before the first at which all its pointers are 16-byte
// aligned; its chunk k is elements [head + k * kBlockElements, ...), and the head goes with chunk 0.
struct AdamRow {
  uint64_t param, grad, exp_avg, exp_avg_sq, master;  // bytes 0, 8, 16, 24, 32
  int64_t numel;                                      // byte 40
  int32_t first_chunk;                                // byte 48: chunks of the rows before it in this launch
  int16_t head;                                       // byte 52: kUnalignable: everything one by one
  uint16_t scalars;                                   // byte 54: index of its scalars
};
static_assert(sizeof(AdamRow) == 56, "documented layout");
constexpr int kUnalignable = -1;

constexpr int kMaxRows = 512;
constexpr int kMaxScalars = 100;  // different step counts among the tensors of a launch

struct AdamParameters {
  const AdamScalars<float> *device_scalars;  // byte 0: formed by step_kernel; null: `scalars` below
  const float *found_inf;                    // byte 8: null, or not zero where nothing may be updated
  int32_t rows, chunks;                      // bytes 16, 20
  AdamScalars<float> scalars[kMaxScalars];   // byte 24
  AdamRow row[kMaxRows];                     // byte 24 + 36 * kMaxScalars
};
static_assert(sizeof(AdamScalars<float>) == 36, "documented layout");
static_assert(sizeof(AdamParameters) == 24 + 36 * kMaxScalars + 56 * kMaxRows, "documented layout");
static_assert(sizeof(AdamParameters) <= kParameterBytes, "the limit of kernel parameters");

constexpr int kMaxSteps = 4000;

struct StepParameters {
  AdamOptions options;          // bytes 0 to 52: five doubles, three int32
  double grad_scale;            // byte 56
  const float *lr;              // byte 64: null, or takes the place of options.lr
  const float *grad_factor;     // byte 72: null, or multiplies grad_scale
  const float *found_inf;       // byte 80: null, or not zero where nothing may be done
  AdamScalars<float> *scalars;  // byte 88: null, or one a counter to be written
  int32_t steps, advance;       // bytes 96, 100
  uint64_t step[kMaxSteps];     // byte 104: addresses of float32 counters, all different if `advance`
};
static_assert(sizeof(StepParameters) == 104 + 8 * kMaxSteps, "documented layout");
static_assert(sizeof(StepParameters) <= kParameterBytes, "the limit of kernel parameters");

// Counters on the device, so that a CUDA graph replays them: a thread adds one to its counter, then
// forms that counter's scalars as the host would.
static __global__ void __launch_bounds__(kThreads) step_kernel(const StepParameters __grid_constant__ a) {
  const int i = (int)(blockIdx.x * kThreads + threadIdx.x);
  if (i >= a.steps || (a.found_inf && *a.found_inf != 0.0f)) return;
  float *counter = (float *)a.step[i];
  const float step = a.advance ? *counter + 1.0f : *counter;
  if (a.advance) *counter = step;
  if (!a.scalars) return;
  AdamOptions options = a.options;
  if (a.lr) options.lr = *a.lr;
  a.scalars[i] = adam_scalars(options, step, a.grad_factor ? a.grad_scale * *a.grad_factor : a.grad_scale);
}

template <class Weight, class Grad, class Moment1, class Moment2>
struct AdamTensor {
  typename Weight::Param *param;
  const typename Grad::Type *grad;
  typename Moment1::Type *exp_avg;
  typename Moment2::Type *exp_avg_sq;
  typename Weight::Master *master;

  STATESTREAM_DEVICE explicit AdamTensor(const AdamRow &row)
      : param((typename Weight::Param *)row.param),
        grad((const typename Grad::Type *)row.grad),
        exp_avg((typename Moment1::Type *)row.exp_avg),
        exp_avg_sq((typename Moment2::Type *)row.exp_avg_sq),
        master((typename Weight::Master *)row.master) {}

  // Elements [i, i + kVector), every pointer at i on 16 bytes; neither beta below 0.5.
  STATESTREAM_DEVICE void update(int64_t i, const AdamScalars<float> &s) const {
    float p[kVector], g[kVector], m[kVector], v[kVector];
    Grad::load(grad + i, g);
    Moment1::load(exp_avg + i, m);
    Moment2::load(exp_avg_sq + i, v);
    Weight::load(param, master, i, p);
#pragma unroll
    for (int k = 0; k < kVector; ++k) adam_update<true>(p[k], g[k], m[k], v[k], s);
    const bool nan = any_nan(p);  // one in m or v has reached p
    Weight::store(param, master, i, p, nan);
    Moment1::store(exp_avg + i, m, nan);
    Moment2::store(exp_avg_sq + i, v, nan);
  }

  STATESTREAM_DEVICE void update_one(int64_t i, const AdamScalars<float> &s) const {
    float p = Weight::load_one(param, master, i);
    float m = Moment1::load_one(exp_avg + i);
    float v = Moment2::load_one(exp_avg_sq + i);
    adam_update(p, Grad::load_one(grad + i), m, v, s);
    Weight::store_one(param, master, i, p);
    Moment1::store_one(exp_avg + i, m);
    Moment2::store_one(exp_avg_sq + i, v);
  }
};

STATESTREAM_DEVICE int row_of(const AdamParameters &a, int64_t chunk) {
  int low = 0, high = a.rows - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (a.row[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

template <class Weight, class Grad, class Moment1, class Moment2>
__global__ void __launch_bounds__(kThreads, kMinBlocks) adam_kernel(const AdamParameters __grid_constant__ a) {
  if (a.found_inf && *a.found_inf != 0.0f) return;
  const int thread = (int)threadIdx.x;
  for (int64_t chunk = blockIdx.x; chunk < a.chunks; chunk += gridDim.x) {
    const AdamRow &row = a.row[row_of(a, chunk)];
    const AdamTensor<Weight, Grad, Moment1, Moment2> tensor(row);
    const AdamScalars<float> s = a.device_scalars ? a.device_scalars[row.scalars] : a.scalars[row.scalars];
    const bool alignable = row.head != kUnalignable;
    const int64_t first = (chunk - row.first_chunk) * kBlockElements;
    const int64_t begin = first + (alignable ? row.head : 0);
    const int64_t end = begin + kBlockElements < row.numel ? begin + kBlockElements : row.numel;
    int64_t head = 0, rest = begin;
    if (alignable) {
      for (int64_t i = begin + thread * kVector; i + kVector <= end; i += kThreads * kVector) tensor.update(i, s);
      if (first == 0) head = row.head;
      rest += (end - begin) / kVector * kVector;
    }
    // One by one: fewer than kVector on either side, or everything.
    for (int64_t k = thread; k < head + end - rest; k += kThreads) tensor.update_one(k < head ? k : rest + k - head, s);
  }
}

}  // namespace statestream
