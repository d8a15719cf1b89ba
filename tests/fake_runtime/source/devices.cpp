// Devices, their contexts, the current one of each thread, and its last error.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace fake {
namespace {

struct Device {
  std::string context;  // what made it: empty where there is none
  bool used = false;
};
Device devices[kDevices];

thread_local int current = -1;
thread_local cudaError_t last_error = cudaSuccess;

std::string thread_name() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

}  // namespace

cudaError_t fail(cudaError_t error) { return last_error = error; }

int current_device() { return current < 0 ? 0 : current; }

int need_context(const char *call) {
  const int device = current_device();
  if (devices[device].context.empty()) devices[device].context = std::string(call) + " on thread " + thread_name();
  return device;
}

void use(int device) { devices[device].used = true; }

}  // namespace fake

using namespace fake;

// Contexts made since the last fake_forget_contexts on devices that were given no work and no memory, a line each. Where
// no device was given any, a single context is one that was asked about its memory, or to pin some.
API const char *fake_unused_contexts() {
  const Lock lock;
  static std::string text;
  text.clear();
  int contexts = 0, used = 0;
  for (const Device &device : devices) contexts += !device.context.empty(), used += device.used;
  if (contexts == 1 && !used) return text.c_str();
  for (int d = 0; d < kDevices; ++d)
    if (!devices[d].context.empty() && !devices[d].used)
      text += "GPU " + std::to_string(d) + " by " + devices[d].context + "\n";
  return text.c_str();
}

// From here on the program is one that has no context yet.
API void fake_forget_contexts() {
  const Lock lock;
  for (Device &device : devices) device = Device();
}

API int fake_has_context(int device) { return !devices[device].context.empty(); }

API void fake_use(int device) { use(device); }

API cudaError_t cudaGetDeviceCount(int *count) {
  *count = kDevices;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  *device = current_device();
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  const Lock lock;
  current = device;
  need_context("cudaSetDevice");
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  *p = cudaDeviceProp();
  std::strcpy(p->name, "a GPU in host memory");
  p->totalGlobalMem = kDeviceBytes;
  p->major = 9;
  p->multiProcessorCount = 4;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 48 << 10;
  p->maxGridSize[0] = INT32_MAX;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->unifiedAddressing = 1;
  p->l2CacheSize = 50 << 20;
  p->pciBusID = device + 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
  std::snprintf(id, n, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  const Lock lock;
  need_context("cudaDeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  if (const cudaError_t error = refuse_beside_captures("cudaDeviceSynchronize")) return fail(error);
  count_host_wait("cudaDeviceSynchronize");
  run_all(need_context("cudaDeviceSynchronize"));
  return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

namespace {

// The driver's functions that torch asks for by name.
int primary_context_state(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = fake_has_context(device);
  return 0;
}
int not_supported() { return cudaErrorNotSupported; }

}  // namespace

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
  *function = !std::strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)primary_context_state : (void *)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

API int cuInit(unsigned) { return 0; }
API int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
API int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  return primary_context_state(device, flags, active);
}
