// The CUDA runtime as the module in this test sees it: two devices, and launches that go to a callback.
//
// nvcc's host code registers each kernel's address and mangled name here, so a launch is passed on by
// the name it has in the PTX, with the bytes that the real launcher made.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace {

std::map<const void *, std::string> &kernels() {
  static std::map<const void *, std::string> names;
  return names;
}

// 0: success; anything else is the cudaError_t that the launch reports.
using LaunchCallback = int (*)(const char *kernel, unsigned grid, unsigned block, const void *parameters, int device,
                               void *stream);

constexpr int kDevices = 2;
LaunchCallback on_launch = nullptr;
int multiprocessors = 1, blocks_each = 1, current_device = 0;

}  // namespace

extern "C" {

void fake_cudart_use(LaunchCallback callback, int multiprocessor_count, int blocks_per_multiprocessor) {
  on_launch = callback;
  multiprocessors = multiprocessor_count;
  blocks_each = blocks_per_multiprocessor;
}

int fake_cudart_device() { return current_device; }

void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *,
                            int *) {
  kernels()[host] = name;
}

// Kernels are launched by cudaLaunchKernel alone; what <<<>>> would need is never reached.
[[noreturn]] static void not_reached(const char *name) {
  std::fprintf(stderr, "fake_cudart: %s is not provided\n", name);
  std::abort();
}
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { not_reached("__cudaGetKernel"); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
  not_reached("__cudaLaunchKernel");
}
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { not_reached("__cudaPopCallConfiguration"); }

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  if (!on_launch || shared || grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1 || !grid.x || !block.x)
    return cudaErrorInvalidConfiguration;
  return (cudaError_t)on_launch(found->second.c_str(), grid.x, block.x, arguments[0], current_device, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *host) {
  *attributes = {};
  return kernels().count(host) ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  *blocks = blocks_each;
  return cudaSuccess;
}
// A launch is cut to the device that runs it: no other may be asked about.
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  if (attribute != cudaDevAttrMultiProcessorCount || device != current_device) return cudaErrorInvalidDevice;
  *value = multiprocessors;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchFailure   ? "cudaErrorLaunchFailure"
         : error == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice"
                                           : "cudaError";
}
const char *cudaGetErrorString(cudaError_t) { return "from fake_cudart"; }
}
