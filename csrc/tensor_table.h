// A list of tensors cut into chunks. The same table drives the CPU kernel, the CUDA kernel and its
// emulation; it knows addresses and counts, never dtypes of a framework.
#pragma once
#include "number_formats.h"

namespace statestream {

// One row as kernels.py writes it: eight 64-bit words. Addresses are 0 where the call's formats say
// there is nothing.
struct TensorRow {
  int64_t numel;
  uint64_t param, grad, exp_avg, exp_avg_sq;
  uint64_t master;  // FP32 master or 16-bit remainders
  uint64_t step;    // float32 count of this tensor's updates
  uint64_t spare;
};
static_assert(sizeof(TensorRow) == 64, "kernels.py writes eight words a row");

// The formats of every row of one call.
struct TableFormats {
  int32_t param, grad, exp_avg, exp_avg_sq, master;
};

// A multiple of 256, the block of a scaled format, so that no cut falls inside a block.
constexpr int64_t kChunkElements = 64 * 1024;

STATESTREAM_HD int64_t chunks_of(int64_t numel, int64_t chunk_elements) {
  return numel / chunk_elements + (numel % chunk_elements != 0);
}

// Which of n rows holds a chunk: first_chunk[i] is the number of chunks before row i, increasing.
// Rows without elements have no chunk and are never returned.
template <class Index>
STATESTREAM_HD int64_t row_of_chunk(const Index *first_chunk, int64_t n, int64_t chunk) {
  int64_t low = 0, high = n - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if ((int64_t)first_chunk[middle] <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace statestream
