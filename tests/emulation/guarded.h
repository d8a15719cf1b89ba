// Memory with a tensor in it and nothing else: an access one element beside it is caught.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (void)0
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (void)0
#endif

// `bytes` bytes that begin `shift` bytes after a 64-byte boundary and end where the allocation ends.
// What lies before is poisoned, as far as AddressSanitizer's 8-byte grain allows, and filled with a
// pattern for the rest.
class Guarded {
 public:
  Guarded(size_t bytes, size_t shift) : bytes_(bytes), shift_(shift) {
    void *raw;
    if (posix_memalign(&raw, 64, bytes + shift + (bytes + shift == 0))) throw std::bad_alloc();
    raw_ = (uint8_t *)raw;
    memset(raw_, kPattern, shift_);
    ASAN_POISON_MEMORY_REGION(raw_, shift_);
  }
  Guarded(Guarded &&other) noexcept { *this = std::move(other); }
  Guarded &operator=(Guarded &&other) noexcept {
    std::swap(raw_, other.raw_);
    std::swap(bytes_, other.bytes_);
    std::swap(shift_, other.shift_);
    return *this;
  }
  ~Guarded() {
    if (raw_) ASAN_UNPOISON_MEMORY_REGION(raw_, shift_);
    free(raw_);
  }

  uint8_t *data() const { return raw_ + shift_; }
  uint64_t address() const { return (uint64_t)data(); }
  size_t bytes() const { return bytes_; }

  bool untouched_before() const {
    ASAN_UNPOISON_MEMORY_REGION(raw_, shift_);
    bool same = true;
    for (size_t i = 0; i < shift_; ++i) same &= raw_[i] == kPattern;
    ASAN_POISON_MEMORY_REGION(raw_, shift_);
    return same;
  }

 private:
  static constexpr uint8_t kPattern = 0xcd;
  uint8_t *raw_ = nullptr;
  size_t bytes_ = 0, shift_ = 0;
};
