// Stands where CUDA's own header stands for the project's sources: their kernels run on the host, and their calls of
// the runtime, launches among them, go to the one that is preloaded.
#pragma once
#include "device_code.h"

// As CUDA numbers them.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidKernelImage = 200,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
};
struct cudaFuncAttributes {};
using cudaStream_t = struct CUstream_st *;

extern "C" {
cudaError_t cudaGetLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t fake_launch(cudaStream_t stream, const char *name, void (*run)(void *), void (*drop)(void *), void *data);
}

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel *) {
  int device;
  // It loads the kernels, and so wants a context.
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaSetDevice(device);
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(const Parameters &), dim3 grid, dim3 block, void **arguments, size_t,
                             cudaStream_t stream) {
  if (!grid.x || !block.x || block.x > 1024 || sizeof(Parameters) > 32764) return cudaErrorInvalidValue;
  struct Launch {
    void (*kernel)(const Parameters &);
    dim3 grid, block;
    Parameters parameters;
  };
  // The device gets its copy of the parameters at the launch.
  auto *const launch = new Launch{kernel, grid, block, *static_cast<const Parameters *>(arguments[0])};
  return fake_launch(
      stream, "a kernel of statestream's",
      [](void *data) {
        const auto &launch = *static_cast<const Launch *>(data);
        emulation::run_launch(launch.kernel, launch.grid, launch.block, launch.parameters);
      },
      [](void *data) { delete static_cast<Launch *>(data); }, launch);
}
