// Stands where CUDA's own header stands, so that the .cu files, launchers included, compile as plain C++. For tests
// only.
#pragma once
#include "device_code.h"

// The few calls of the runtime that the launchers make.
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
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
struct cudaFuncAttributes {};
using cudaStream_t = struct Stream *;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidKernelImage: return "cudaErrorInvalidKernelImage";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    case cudaErrorUnsupportedPtxVersion: return "cudaErrorUnsupportedPtxVersion";
  }
  return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t error) { return error ? "some error" : "no error"; }
inline cudaError_t cudaGetDeviceCount(int *count) {
  if (!emulation::settings.count_error) *count = 1;
  return (cudaError_t)emulation::settings.count_error;
}
inline cudaError_t cudaDriverGetVersion(int *version) {
  *version = emulation::settings.driver;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emulation::settings.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emulation::settings.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emulation::settings.capability % 10; break;
  }
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel *) {
  return (cudaError_t)emulation::settings.image_error;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int, size_t) {
  *blocks = emulation::settings.blocks_per_multiprocessor;
  return cudaSuccess;
}

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(const Parameters &), dim3 grid, dim3 block, void **arguments, size_t,
                             cudaStream_t) {
  // The limits of the device: a grid without blocks is an error there too.
  if (!grid.x || !block.x || block.x > 1024 || sizeof(Parameters) > 32764) return cudaErrorInvalidValue;
  // The device gets its copy of the parameters at the launch.
  const Parameters parameters = *static_cast<const Parameters *>(arguments[0]);
  emulation::run_launch(kernel, grid, block, parameters);
  return cudaSuccess;
}
