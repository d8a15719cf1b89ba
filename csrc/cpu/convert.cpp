#include <algorithm>

#include "adam.h"
#include "past_cache.h"
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

// Elements from which on results are written past the caches: by the time that someone reads such a state, or saves its
// values, they would have been pushed out.
constexpr int64_t kPastCacheElements = 1 << 20;
// What is converted at a time before it is written so: whole blocks of a scaled format, small beside a core's cache.
constexpr int64_t kScratchElements = 512;
static_assert(kScratchElements % kScaleBlock == 0 && kChunkElements % kScratchElements == 0, "cuts fall on blocks");

// Calls convert(first element, elements, scratch) for parts of [begin, end), and copies what it left in `scratch` to
// their places, elements of so many bytes.
template <class Convert>
void past_cache(int64_t bytes, char *to, int64_t begin, int64_t end, const Convert &convert) {
  alignas(64) char scratch[kScratchElements * sizeof(float)];
  for (int64_t i = begin; i < end; i += kScratchElements) {
    const int64_t count = std::min(kScratchElements, end - i);
    convert(i, count, scratch);
    copy_past_cache(to + i * bytes, scratch, count * bytes);
  }
  end_past_cache();
}

}  // namespace

void decode(const Isa &isa, int32_t format, const void *from, float *to, int64_t n, int threads, const float *scale,
            bool root) {
  const DecodeRange range = isa.decode(format, root);
  const int64_t bytes = format_bytes(format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) {
    if (n < kPastCacheElements) return range(from, scale, to, begin, end);
    past_cache(sizeof(float), (char *)to, begin, end, [&](int64_t first, int64_t count, void *scratch) {
      range((const char *)from + first * bytes, scale ? scale + first / kScaleBlock : nullptr, (float *)scratch, 0,
            count);
    });
  });
}

void encode(const Isa &isa, int32_t format, const float *from, void *to, int64_t n, int threads, float *scale,
            bool root) {
  const EncodeRange range = isa.encode(format, root);
  const int64_t bytes = format_bytes(format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) {
    if (n < kPastCacheElements) return range(from, to, scale, begin, end);
    past_cache(bytes, (char *)to, begin, end, [&](int64_t first, int64_t count, void *scratch) {
      range(from + first, scratch, scale ? scale + first / kScaleBlock : nullptr, 0, count);
    });
  });
}

void refresh_master(const Isa &isa, const void *weight, void *master, int64_t n, int threads, int32_t param_format,
                    int32_t master_format, float *scale) {
  const RefreshRange range = isa.refresh(param_format, master_format);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { range(weight, master, scale, begin, end); });
}

}  // namespace statestream
