#include "adam.h"

#include <algorithm>
#include <vector>

#include "floating_point.h"
#include "threads.h"

namespace statestream {
namespace {

// What a thread takes at once. The longer the pieces, the less often its streams of memory begin anew; but each thread
// has several to take, as not all are equally fast.
int64_t chunk_elements(int64_t elements, int threads) {
  constexpr int64_t kLongest = 16 * kChunkElements;
  const int64_t share = elements / (8 * threads) / kChunkElements * kChunkElements;
  return std::clamp(share, kChunkElements, kLongest);
}

}  // namespace

void adam(const Isa &isa, const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options,
          double grad_scale, int threads, const CallExtras &extras) {
  // The scalars too: a denormal eps would be flushed, and lr / bc1 rounded as the caller rounds.
  const DefaultFloatingPoint environment;
  const AdamRange hot = extras.stochastic ? nullptr : isa.adam(formats);
  const GenericCall call{formats, extras.seed, extras.stochastic};
  int64_t elements = 0;
  for (int64_t i = 0; i < n; ++i) elements += rows[i].numel;
  // Below a chunk's worth a thread costs more than it brings.
  threads = (int)std::max<int64_t>(std::min<int64_t>(threads, chunks_of(elements, kChunkElements)), 1);
  const int64_t chunk_length = chunk_elements(elements, threads);
  std::vector<AdamScalars<float>> scalars(n);
  std::vector<int64_t> first_chunk(n);
  int64_t chunks = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float step = *(const float *)rows[i].step;
    const bool same = i && step == *(const float *)rows[i - 1].step;
    scalars[i] = same ? scalars[i - 1] : adam_scalars(options, step, grad_scale);
    first_chunk[i] = chunks;
    chunks += chunks_of(rows[i].numel, chunk_length);
  }

  const auto update = [&](int64_t i, int64_t begin, int64_t end) {
    if (hot)
      hot(rows[i], scalars[i], begin, end);
    else
      isa.generic(call, rows[i], extras.rows ? extras.rows + i : nullptr, scalars[i], begin, end);
  };
  if (threads <= 1) {
    parallel_for(n, 1, [&](int64_t i) { update(i, 0, rows[i].numel); });
    return;
  }
  parallel_for(chunks, threads, [&](int64_t chunk) {
    const int64_t i = row_of_chunk(first_chunk.data(), n, chunk);
    const int64_t begin = (chunk - first_chunk[i]) * chunk_length;
    update(i, begin, std::min(begin + chunk_length, rows[i].numel));
  });
}

}  // namespace statestream
