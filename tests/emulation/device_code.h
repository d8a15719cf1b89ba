// What device code needs, so that it compiles as plain C++ and runs on ordinary memory. For tests only. Kernels
// without barriers, shared memory or atomics.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "warps.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__ &  // parameters are large, and every thread would copy them

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// Aligned as on the device: -fsanitize=alignment stops an access that would fault there.
struct __attribute__((may_alias, aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

enum class Order { kForward, kReverse, kShuffled };

struct Settings {
  Order order = Order::kForward;  // of all threads of a launch
  uint64_t shuffle = 1;           // seed of the shuffled order
  int multiprocessors = 1;
  int blocks_per_multiprocessor = 2;
  int count_error = 0, image_error = 0, driver = 13000, capability = 90;  // what a device that cannot run says
  bool (*runs_block)(unsigned block) = nullptr;                           // which blocks of a launch run; null: all
};
inline Settings settings;

struct Counters {
  uint64_t launches, threads, wide_loads, wide_stores;
};
inline Counters counters;

}  // namespace emulation

inline uint4 __ldcs(const uint4 *from) {
  ++emulation::counters.wide_loads;
  return *from;
}
inline uint2 __ldcs(const uint2 *from) { return *from; }
inline void __stcs(uint2 *to, uint2 value) { *to = value; }
inline void __stcs(uint4 *to, uint4 value) {
  ++emulation::counters.wide_stores;
  *to = value;
}

namespace statestream {
// cvt.rn.bf16x2.f32: nearest even, and 0x7fff for a NaN.
inline uint32_t cvt_rn_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return 0x7fff;
  const uint32_t kept = u >> 16, rest = u & 0xffff;
  return kept + (rest > 0x8000 || (rest == 0x8000 && kept % 2));
}
inline uint32_t cvt_rn_bf16x2(float high, float low) { return cvt_rn_bf16(high) << 16 | cvt_rn_bf16(low); }
}  // namespace statestream

namespace statestream {
struct GenericParameters;
struct GenericConvertParameters;
}  // namespace statestream

namespace emulation {

// Whether the lanes of a kernel meet, by its parameters.
template <class Parameters>
constexpr bool kLanesMeet = false;
template <>
inline constexpr bool kLanesMeet<statestream::GenericParameters> = true;
template <>
inline constexpr bool kLanesMeet<statestream::GenericConvertParameters> = true;

// The numbers below `n` in the order of the settings, shuffled otherwise in each round.
class Sequence {
 public:
  explicit Sequence(uint64_t n, uint64_t round = 0) : n_(n), stride_((settings.shuffle + round) * 2654435761u % n) {
    while (std::gcd(stride_, n) != 1) ++stride_;
  }
  uint64_t operator[](uint64_t place) const {
    switch (settings.order) {
      case Order::kForward: return place;
      case Order::kReverse: return n_ - 1 - place;
      case Order::kShuffled: break;
    }
    return place * stride_ % n_;
  }

 private:
  uint64_t n_, stride_;
};

inline bool runs(unsigned block) { return !settings.runs_block || settings.runs_block(block); }

// All threads of a launch in one order, each from begin to end.
template <class Kernel>
void run_threads(const Kernel &kernel) {
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  const Sequence sequence(threads);
  for (uint64_t q = 0; q < threads; ++q) {
    const uint64_t thread = sequence[q];
    blockIdx = dim3((unsigned)(thread / blockDim.x));
    threadIdx = dim3((unsigned)(thread % blockDim.x));
    if (!runs(blockIdx.x)) {
      q += settings.order == Order::kForward ? blockDim.x - 1 - threadIdx.x : 0;
      continue;
    }
    ++counters.threads;
    kernel();
  }
}

// Block by block, the threads of a block in turns.
template <class Kernel>
void run_blocks(const Kernel &kernel) {
  const Sequence sequence(gridDim.x);
  for (uint64_t q = 0; q < gridDim.x; ++q) {
    blockIdx = dim3((unsigned)sequence[q]);
    if (!runs(blockIdx.x)) continue;
    counters.threads += blockDim.x;
    run_block(
        blockDim.x,
        [&](unsigned thread) {
          threadIdx = dim3(thread);
          kernel();
        },
        [](uint64_t round) {
          const Sequence lanes(blockDim.x, round);
          std::vector<unsigned> order;
          for (unsigned k = 0; k < blockDim.x; ++k) order.push_back((unsigned)lanes[k]);
          return order;
        });
  }
}

}  // namespace emulation

namespace emulation {
inline LaneValues meet(unsigned mask, uint32_t value, int place) {
  const dim3 own = threadIdx;  // other threads run meanwhile
  const LaneValues seen = exchange(mask, value, place);
  threadIdx = own;
  return seen;
}
}  // namespace emulation

inline unsigned __reduce_max_sync(unsigned mask, unsigned value, int place = __builtin_LINE()) {
  const auto seen = emulation::meet(mask, value, place);
  return *std::max_element(seen.begin(), seen.end());
}
inline float __shfl_sync(unsigned mask, float value, int lane, int place = __builtin_LINE()) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const auto seen = emulation::meet(mask, bits, place);
  if (!(mask >> lane & 1)) throw std::logic_error("a value of a lane that the mask does not name");
  memcpy(&value, &seen[lane], 4);
  return value;
}

namespace emulation {
// All of a launch, at once.
template <class Parameters>
void run_launch(void (*kernel)(const Parameters &), dim3 grid, dim3 block, const Parameters &parameters) {
  ++counters.launches;
  gridDim = grid;
  blockDim = block;
  const auto run = [&] { kernel(parameters); };
  if constexpr (kLanesMeet<Parameters>)
    run_blocks(run);
  else
    run_threads(run);
}
}  // namespace emulation
