#include <algorithm>

#include "adam.h"
#include "threads.h"

namespace statestream {
namespace {

template <class Range>
void over_chunks(int64_t n, int threads, const Range &range) {
  parallel_for(chunks_of(n, kChunkElements), threads, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunkElements;
    range(begin, std::min(begin + kChunkElements, n));
  });
}

}  // namespace

void decode(const Form &form, int32_t format, const void *from, float *to, int64_t n, int threads) {
  const DecodeRange range = form.decode(format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(from, to, begin, end); });
}

void encode(const Form &form, int32_t format, const float *from, void *to, int64_t n, int threads) {
  const EncodeRange range = form.encode(format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(from, to, begin, end); });
}

void refresh_master(const Form &form, const uint16_t *weight, float *master, int64_t n, int threads) {
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { form.refresh(weight, master, begin, end); });
}

}  // namespace statestream
