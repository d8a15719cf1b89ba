// Whether a device can run this build, in words that say what to do.
#include "launch.h"

#if !defined(STATESTREAM_CUDA_ARCHS)
#define STATESTREAM_CUDA_ARCHS "unknown architectures"
#endif

namespace statestream {
namespace {

// CUDA 12.1, as cudaDriverGetVersion has it: kernels have up to 32 KB of parameters.
constexpr int kOldestDriver = 12010;

std::string version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

std::string in_words(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

std::string reason(cudaError_t error, int device) {
  int driver = 0, runtime = 0, major = 0, minor = 0;
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInvalidKernelImage:  // made by an nvcc that the driver does not know yet
      (void)cudaDriverGetVersion(&driver);
      (void)cudaRuntimeGetVersion(&runtime);
      if (!driver) return std::string("there is no NVIDIA driver [") + cudaGetErrorName(error) + "]";
      return "the NVIDIA driver serves CUDA " + version(driver) + " and statestream was built for CUDA " +
             version(runtime) + ": update the driver, or build statestream with an older nvcc [" +
             cudaGetErrorName(error) + "]";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      return "its compute capability is " + std::to_string(major) + "." + std::to_string(minor) + ", " +
             (major < 8
                  ? std::string("and statestream needs 8.0 or later")
                  : "and statestream was built for " STATESTREAM_CUDA_ARCHS ": build it with STATESTREAM_CUDA_ARCHS=" +
                        std::to_string(major) + std::to_string(minor)) +
             " [" + cudaGetErrorName(error) + "]";
    default: return in_words(error);
  }
}

}  // namespace

std::string why_not(int device) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices)) {
    (void)cudaGetLastError();
    return reason(error, device);
  }
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver < kOldestDriver)
    return "the NVIDIA driver serves CUDA " + version(driver) + ", and the kernels' parameters need " +
           version(kOldestDriver) + ": update the driver to 530 or later";
  if (device < 0 || device >= devices) return "CUDA sees " + std::to_string(devices) + " devices";
  set_device(device);
  if (const cudaError_t error = image_error()) {
    (void)cudaGetLastError();
    return reason(error, device);
  }
  return "";
}

}  // namespace statestream
