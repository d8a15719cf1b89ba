// Writing what nobody reads soon.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace statestream {

// memcpy that leaves the caches as they are, and does not read the lines that it writes. What it wrote may reach other
// threads late: end_past_cache() comes before they are told of it.
inline void copy_past_cache(void *to, const void *from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  if ((uintptr_t)to % 16 == 0) {
    for (; bytes >= kLine; bytes -= kLine, to = (char *)to + kLine, from = (const char *)from + kLine)
      for (size_t k = 0; k < kLine; k += 16)
        _mm_stream_si128((__m128i *)((char *)to + k), _mm_loadu_si128((const __m128i *)((const char *)from + k)));
  }
#endif
  memcpy(to, from, bytes);
}

inline void end_past_cache() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace statestream
