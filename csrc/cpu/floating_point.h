// The floating-point environment that the bits of a step are promised in.
#pragma once
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace statestream {

// Round to nearest with denormals kept, as at program start, on this thread while it lives; then
// whatever the caller had set (torch.set_flush_denormal changes it).
class DefaultFloatingPoint {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();

 public:
  DefaultFloatingPoint() { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  uint64_t saved_;

 public:
  DefaultFloatingPoint() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatingPoint() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
 public:
  DefaultFloatingPoint() {}
  ~DefaultFloatingPoint() {}
#endif
};

}  // namespace statestream
