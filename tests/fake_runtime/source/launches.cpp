// Kernels. The project's own come from its sources (cuda_runtime.h beside this file), torch's from Python
// (torch_kernels.py); one of torch's that has no stand-in is refused by name.
#include <cxxabi.h>

#include <cstring>

#include "runtime.h"

namespace fake {
namespace {

std::map<const void *, std::string> &names() {
  static std::map<const void *, std::string> kernels;
  return kernels;
}

// As the device's clock counts in torch.cuda._sleep.
constexpr double kCyclesPerMillisecond = 2e6;

void (*run_python)(uint64_t) = nullptr;

cudaError_t launch_of_torch(const void *kernel, void **arguments, cudaStream_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaLaunchKernel");
  const auto stream = stream_of(handle);
  if (!stream || stream->device != current_device()) return fail(cudaErrorInvalidResourceHandle);
  const auto found = names().find(kernel);
  const std::string name = found == names().end() ? "an unknown kernel" : found->second;
  if (name.find("spin_kernel") != std::string::npos) {
    Work work;
    work.name = "sleep";
    work.milliseconds = (double)*(const int64_t *)arguments[0] / kCyclesPerMillisecond;
    work.stalls_until = now() + 100 * work.milliseconds;  // all else takes so much longer, too
    return push(stream, std::move(work));
  }
  report("a kernel of torch's that has no stand-in here: " + name);
  return fail(cudaErrorNotSupported);
}

}  // namespace
}  // namespace fake

using namespace fake;

// A kernel of the project's: `run(data)` does it, `drop(data)` frees what it needs.
API cudaError_t fake_launch(cudaStream_t handle, const char *name, void (*run)(void *), void (*drop)(void *),
                            void *data) {
  const std::shared_ptr<void> keeps(data, drop);
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaLaunchKernel");
  const auto stream = stream_of(handle);
  if (!stream || stream->device != current_device()) return fail(cudaErrorInvalidResourceHandle);
  use(stream->device);
  Work work;
  work.name = name;
  work.keeps = keeps;
  work.steps.push_back([run, data] { run(data); });
  return push(stream, std::move(work));
}

// `run(number)` does a kernel of torch's, under Python's lock.
API void fake_use_python(void (*run)(uint64_t)) { run_python = run; }

API cudaError_t fake_launch_python(int device, cudaStream_t handle, const char *name, uint64_t number) {
  const Lock lock;
  const auto stream = handle ? stream_of(handle) : legacy_stream(device);
  if (!stream || stream->device != device) return fail(cudaErrorInvalidResourceHandle);
  use(device);
  Work work;
  work.name = name;
  work.steps.push_back([number] {
    const WithPython python;
    if (python.there()) run_python(number);
  });
  return push(stream, std::move(work));
}

// Fresh memory of an allocator's: what was there before, whatever that was.
API cudaError_t fake_poison(int device, cudaStream_t handle, void *address, size_t bytes) {
  const Lock lock;
  const auto stream = handle ? stream_of(handle) : legacy_stream(device);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  Work work;
  work.name = "earlier use of the memory";
  work.milliseconds = 0;
  work.steps.push_back([address, bytes] {
    if (block_of(address).kind == Kind::kDevice) poison(address, bytes);
  });
  return push(stream, std::move(work));
}

API void fake_report(const char *hazard) {
  const Lock lock;
  report(hazard);
}

API cudaError_t fake_synchronize(int device, cudaStream_t handle) {
  const Lock lock;
  const auto stream = handle ? stream_of(handle) : legacy_stream(device);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_in_capture(stream, "a wait for an operation of torch's")) return fail(error);
  count_host_wait("an operation of torch's");
  run_until(tail(stream));
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_of_torch(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return launch_of_torch(kernel, arguments, config->stream);
}
API cudaError_t __cudaLaunchKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_of_torch(kernel, arguments, stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  *attributes = cudaFuncAttributes();
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                       unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// What the host code of each .cu file says of itself when it is loaded.
API void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *host_function, char *, const char *name, int, uint3 *, uint3 *,
                                dim3 *, dim3 *, int *) {
  names()[host_function] = name;
}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API char __cudaInitModule(void **) { return 1; }

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void *stream;
};
thread_local std::vector<Configuration> configurations;
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st *stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *(void **)stream = last.stream;
  return cudaSuccess;
}
