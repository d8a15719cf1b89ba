// Random bits of elements in memory order, many at once where their global indices follow each other.
#pragma once
#include <string.h>

#include "../random_bits.h"
#include "../tensor_table.h"

namespace {

using statestream::RandomKey;
using statestream::RowExtras;

// Those of the eight elements of each of kLanes groups, in the order of their global indices.
constexpr int kLanes = 16;
void random_groups(const RandomKey &key, uint64_t first_group, uint16_t *out) {
  statestream::PhiloxBlock block[kLanes];
  for (int k = 0; k < kLanes; ++k) block[k] = statestream::random_group(key, first_group + k);
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                "a word's low half comes first in memory, as in random_bits");
  memcpy(out, block, sizeof block);
}

// Those of n elements whose global indices follow each other.
void random_run(const RandomKey &key, uint64_t global, int64_t n, uint16_t *out) {
  while (n > 0) {
    const int64_t skip = (int64_t)(global & 7);
    uint16_t drawn[8 * kLanes];
    int64_t got = 8;
    if (n > 16) {
      random_groups(key, global >> 3, drawn);
      got *= kLanes;
    } else {
      const statestream::PhiloxBlock group = statestream::random_group(key, global >> 3);
      for (int j = 0; j < 8; ++j) drawn[j] = (uint16_t)statestream::random_bits(group, j);
    }
    got = got - skip < n ? got - skip : n;
    memcpy(out, drawn + skip, got * sizeof *out);
    global += got;
    out += got;
    n -= got;
  }
}

// How many elements from number i of the row on have global indices that follow each other.
int64_t run_length(const RowExtras &row, int64_t i, int64_t n) {
  const int64_t x = row.first + i;
  int64_t stride = row.stride0, left = n;
  if (row.size1 != 1) {
    stride = row.stride2;
    left = row.size1 - x % row.size1;
  } else if (row.size0 != 1) {
    stride = row.stride1;
    left = row.size0 - x % row.size0;
  }
  return stride != 1 ? 1 : left < n ? left : n;
}

void random_block(const RowExtras &row, const RandomKey &key, int64_t i, int64_t n, uint16_t *out) {
  while (n > 0) {
    const int64_t run = run_length(row, i, n);
    random_run(key, statestream::global_index(row, i), run, out);
    i += run;
    out += run;
    n -= run;
  }
}

}  // namespace
