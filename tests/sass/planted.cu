// Kernels that break the limits, to see that each breach is reported.
#include <stdint.h>

__global__ void narrow_stores(const uint4 *from, uint32_t *to, int64_t n) {
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const uint4 a = from[i];
    to[4 * i] = a.x;
    to[4 * i + 1] = a.y;
    __syncwarp();  // or the compiler joins them
    to[4 * i + 2] = a.z;
    to[4 * i + 3] = a.w;
  }
}

// More live values than 16 registers hold.
__global__ void __launch_bounds__(1024, 2) spills(const float *from, float *to) {
  float x[64];
#pragma unroll
  for (int k = 0; k < 64; ++k) x[k] = from[k * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 64; ++k) to[((k * 29) % 64) * 1024 + threadIdx.x] = x[k] + x[(k + 17) % 64];
}
