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

void decode(const Form &form, int32_t format, const void *from, float *to, int64_t n, int threads, const float *scale,
            bool root) {
  const DecodeRange range = form.decode(format, root);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(from, scale, to, begin, end); });
}

void encode(const Form &form, int32_t format, const float *from, void *to, int64_t n, int threads, float *scale,
            bool root) {
  const EncodeRange range = form.encode(format, root);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(from, to, scale, begin, end); });
}

void refresh_master(const Form &form, const void *weight, void *master, int64_t n, int threads, int32_t param_format,
                    int32_t master_format, float *scale) {
  const RefreshRange range = form.refresh(param_format, master_format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(weight, master, scale, begin, end); });
}

}  // namespace statestream
