#include "warp_case.h"

#include <map>
#include <vector>

#include "cuda_runtime.h"

struct WarpParameters {
  uint32_t *out;  // one a thread
};
template <>
inline constexpr bool emulation::kLanesMeet<WarpParameters> = true;

namespace {

constexpr unsigned kThreads = 96, kBlocks = 3, kAll = 0xffffffffu;

uint32_t number_of(unsigned thread, unsigned round) { return (thread * 2654435761u) ^ (round * 40503u); }

// Warp w meets w + 1 times, over values that no other round has; then every lane knows all of them.
void rounds(const WarpParameters &a) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  uint32_t seen = 0;
  for (unsigned round = 0; round <= threadIdx.x / 32; ++round)
    seen = seen * 31 + __reduce_max_sync(kAll, number_of(thread, round));
  a.out[blockIdx.x * kThreads + threadIdx.x] = seen;
}

// Lanes of a half each meet their half; the values of the other are larger.
void halves(const WarpParameters &a) {
  const bool upper = threadIdx.x % 32 >= 16;
  const uint32_t value = threadIdx.x % 16 + (upper ? 1000 : 0);
  a.out[blockIdx.x * kThreads + threadIdx.x] = __reduce_max_sync(upper ? 0xffff0000u : 0xffffu, value);
}

void lane_ends(const WarpParameters &a) {
  if (threadIdx.x == 40) return;
  a.out[0] = __reduce_max_sync(kAll, 1);
}

void other_mask(const WarpParameters &a) { a.out[0] = __reduce_max_sync(threadIdx.x == 5 ? 0x3fu : kAll, 1); }

void not_in_mask(const WarpParameters &a) { a.out[0] = __reduce_max_sync(0xfffffffeu, 1); }

void other_place(const WarpParameters &a) {
  if (threadIdx.x % 32 < 3)
    a.out[0] = __reduce_max_sync(kAll, 1);
  else
    a.out[0] = __reduce_max_sync(kAll, 2);
}

uint32_t expected(const std::string &name, unsigned block, unsigned thread) {
  if (name == "halves") return thread % 32 < 16 ? 15 : 1015;
  uint32_t seen = 0;
  for (unsigned round = 0; round <= thread / 32; ++round) {
    uint32_t largest = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      const uint32_t value = number_of(block * kThreads + thread / 32 * 32 + lane, round);
      if (value > largest) largest = value;
    }
    seen = seen * 31 + largest;
  }
  return seen;
}

}  // namespace

std::string run_warps(const std::string &kernel) {
  static const std::map<std::string, void (*)(const WarpParameters &)> kernels = {
      {"rounds", rounds},         {"halves", halves},           {"lane_ends", lane_ends},
      {"other_mask", other_mask}, {"not_in_mask", not_in_mask}, {"other_place", other_place}};
  std::vector<uint32_t> out(kBlocks * kThreads);
  WarpParameters parameters{out.data()};
  void *arguments[] = {&parameters};
  cudaLaunchKernel(kernels.at(kernel), dim3(kBlocks), dim3(kThreads), arguments, 0, nullptr);
  for (unsigned block = 0; block < kBlocks; ++block)
    for (unsigned thread = 0; thread < kThreads; ++thread)
      if (out[block * kThreads + thread] != expected(kernel, block, thread))
        return "block " + std::to_string(block) + ", thread " + std::to_string(thread) + " has another value";
  return "";
}
