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

void random_block(const RowExtras &row, const RandomKey &key, int64_t i, int64_t n, uint16_t *out) {
  while (n > 0) {
    const statestream::Coordinates place = statestream::coordinates(row, i);
    const int64_t run = statestream::run_length(row, place, n);
    random_run(key, statestream::global_index(row, place), run, out);
    i += run;
    out += run;
    n -= run;
  }
}

}  // namespace
