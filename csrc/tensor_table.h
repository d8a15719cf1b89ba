// A list of tensors cut into chunks. The same table drives the CPU kernel, the CUDA kernel and its
// emulation; it knows addresses and counts, never dtypes of a framework.
#pragma once
#include "number_formats.h"

namespace statestream {

// One row as statestream.kernels writes it: eight 64-bit words. Addresses are 0 where the call's formats say
// there is nothing.
struct TensorRow {
  int64_t numel;
  uint64_t param, grad, exp_avg, exp_avg_sq;
  uint64_t master;  // FP32 master or 16-bit remainders
  uint64_t step;    // float32 count of this tensor's updates
  uint64_t spare;
};
static_assert(sizeof(TensorRow) == 64, "statestream.kernels writes eight words a row");

// Adds one to each row's step counter in host memory, rows without elements included.
inline void advance_host_steps(const TensorRow *rows, int64_t n) {
  for (int64_t i = 0; i < n; ++i) *(float *)rows[i].step += 1.0f;
}

// What a row needs besides, where a format has scales or bits are random: twelve 64-bit words, in a table
// of their own.
//
// Random bits hang on an element's index in the whole tensor, of which the row's may be a shard. Element i
// of the row is number x = first + i of its local tensor in memory order, at coordinates
// (x / size1 / size0, x / size1 % size0, x % size1); strides and offset lead from there to the whole.
struct RowExtras {
  // Addresses of float32 scales, that of the row's first element; 0 where the format has none.
  uint64_t exp_avg_scale, exp_avg_sq_scale, master_scale;
  int64_t ordinal;       // of the parameter, in 32 bits
  int64_t first;         // with a scaled format on a block's edge
  int64_t size0, size1;  // 1 for levels that are not needed
  int64_t stride0, stride1, stride2;
  int64_t offset;
  int64_t spare;
};
static_assert(sizeof(RowExtras) == 96, "statestream.kernels writes twelve words a row");

// Those coordinates. Unsigned: it divides in fewer registers, and whatever strides are given, nothing overflows.
struct Coordinates {
  uint64_t outer, middle, inner;
};

STATESTREAM_HD Coordinates coordinates(const RowExtras &row, int64_t i) {
  Coordinates c{(uint64_t)row.first + (uint64_t)i, 0, 0};
  if (row.size1 != 1) {
    c.inner = c.outer % (uint64_t)row.size1;
    c.outer /= (uint64_t)row.size1;
  }
  if (row.size0 != 1) {
    c.middle = c.outer % (uint64_t)row.size0;
    c.outer /= (uint64_t)row.size0;
  }
  return c;
}

// Those of the next element.
STATESTREAM_HD void advance(const RowExtras &row, Coordinates *c) {
  if (++c->inner != (uint64_t)row.size1) return;
  c->inner = 0;
  if (++c->middle != (uint64_t)row.size0) return;
  c->middle = 0;
  ++c->outer;
}

STATESTREAM_HD uint64_t global_index(const RowExtras &row, const Coordinates &c) {
  return (uint64_t)row.offset + c.outer * (uint64_t)row.stride0 + c.middle * (uint64_t)row.stride1 +
         c.inner * (uint64_t)row.stride2;
}

STATESTREAM_HD uint64_t global_index(const RowExtras &row, int64_t i) { return global_index(row, coordinates(row, i)); }

// How many elements from these coordinates on, of n, follow each other in the whole tensor too.
STATESTREAM_HD int64_t run_length(const RowExtras &row, const Coordinates &c, int64_t n) {
  const bool inner = row.size1 != 1, middle = !inner && row.size0 != 1;
  const int64_t left = inner ? row.size1 - (int64_t)c.inner : middle ? row.size0 - (int64_t)c.middle : n;
  const int64_t stride = inner ? row.stride2 : middle ? row.stride1 : row.stride0;
  return stride != 1 ? 1 : left < n ? left : n;
}

// The formats of every row of one call.
struct TableFormats {
  int32_t param, grad, exp_avg, exp_avg_sq, master;
};

// An FP32 parameter is its own master, and remainders are of BF16 ones.
STATESTREAM_HD bool is_master_of(int32_t param, int32_t master) {
  if (master == kRemainder) return param == kBFloat16;
  return has_role(param, kParameter) && param != kFloat32 && has_role(master, kMaster);
}

// The combinations that there are kernels for, on every device; nothing else is refused for its formats.
STATESTREAM_HD bool has_kernel(const TableFormats &f) {
  return has_role(f.param, kParameter) && (f.master == kNone || is_master_of(f.param, f.master)) &&
         has_role(f.grad, kGradient) && has_role(f.exp_avg, kMoment) && has_role(f.exp_avg_sq, kMoment);
}

// Bits of the `stochastic` argument, and the number of a tensor in its random key.
enum StochasticTensor : int32_t { kExpAvgBits = 0, kExpAvgSqBits = 1, kParamBits = 2 };

// Whether each flag is of a tensor that is rounded and takes it.
STATESTREAM_HD bool takes_stochastic(const TableFormats &f, int32_t flags) {
  const auto is_rounded = [](int32_t format) { return has_role(format, kMoment) && format_bytes(format) < 4; };
  return flags >= 0 && flags < 8 && (!(flags >> kExpAvgBits & 1) || is_rounded(f.exp_avg)) &&
         (!(flags >> kExpAvgSqBits & 1) || is_rounded(f.exp_avg_sq)) &&
         (!(flags >> kParamBits & 1) || (f.param == kBFloat16 && f.master == kNone));
}

// Scales, indices and randomness of a call's rows, where it needs them.
struct CallExtras {
  const RowExtras *rows = nullptr;
  uint64_t seed = 0;
  int32_t stochastic = 0;  // flags of StochasticTensor
};

// The flags, and that of a second moment with scales: it changes by far less than half a unit of such a format a
// step, and to nearest it would stay.
STATESTREAM_HD int32_t random_flags(const TableFormats &f, int32_t stochastic) {
  return stochastic | (int32_t)is_scaled(f.exp_avg_sq) << kExpAvgSqBits;
}

// Whether a row needs RowExtras.
STATESTREAM_HD bool needs_extras(const TableFormats &f, int32_t stochastic) {
  return stochastic || is_scaled(f.exp_avg) || is_scaled(f.exp_avg_sq) || is_scaled(f.master);
}

// A multiple of 256, the block of a scaled format, so that no cut falls inside a block.
constexpr int64_t kChunkElements = 64 * 1024;

STATESTREAM_HD int64_t chunks_of(int64_t numel, int64_t chunk_elements) {
  return numel / chunk_elements + (numel % chunk_elements != 0);
}

// Which of n rows holds a chunk: first_chunk[i] is the number of chunks before row i, increasing.
// Rows without elements have no chunk and are never returned.
template <class FirstChunk, class Count>
STATESTREAM_HD Count row_of_chunk(const FirstChunk &first_chunk, Count n, int64_t chunk) {
  Count low = 0, high = n - 1;
  while (low < high) {
    const Count middle = low + (high - low + 1) / 2;
    if ((int64_t)first_chunk[middle] <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace statestream
