// What the launchers share: CUDA's errors as exceptions, the current device, the size of a grid.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "adam.h"

namespace statestream {

inline void check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next call would report it again
  throw std::runtime_error(std::string(cudaGetErrorName(error)) + " in " + what + ": " + cudaGetErrorString(error));
}

// Whether the current device has an image of the kernels.
cudaError_t image_error();

// It stays so: the caller sets the former device back (statestream.kernels), with torch's guard, which does that only
// where it has a context. To set it back from here would open one.
inline void set_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

// Blocks of a kernel that the current device runs at once: a grid of them never waits in a queue.
template <class Kernel>
int64_t resident_blocks(Kernel *kernel, int threads) {
  int device, multiprocessors, blocks;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return (int64_t)multiprocessors * std::max(blocks, 1);
}

template <class Kernel, class Parameters>
void launch(Kernel *kernel, int64_t blocks, int threads, const Parameters &parameters, const Place &place) {
  void *arguments[] = {const_cast<Parameters *>(&parameters)};
  check(cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3((unsigned)threads), arguments, 0,
                         (cudaStream_t)place.stream),
        "cudaLaunchKernel");
}

}  // namespace statestream
