// The CUDA side of the tables, without CUDA's headers: module.cpp and the emulation call these.
// A failing CUDA call throws std::runtime_error with CUDA's name for the error.
#pragma once
#include <string>

#include "../adam_rule.h"
#include "../tensor_table.h"

namespace statestream {

// Where a call runs: everything is queued on `stream` (a cudaStream_t; null: the default stream).
struct Place {
  int device;
  void *stream;
};

// A capturable call's settings, at addresses on the device; 0 where there is none.
struct DeviceScalars {
  uint64_t lr;          // float32, takes the place of the option
  uint64_t grad_scale;  // float32, multiplies the call's grad_scale
  uint64_t found_inf;   // float32: nothing at all is changed where it is not zero
  uint64_t scratch;     // kScratchBytes a row, 4-byte aligned, used until the call's work is done
};
constexpr int64_t kScratchBytes = sizeof(AdamScalars<float>);

// Updates every row; takes whatever has_kernel(). Step counters are float32 in host memory; `advance` adds one to
// each first.
void adam(const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options, double grad_scale,
          bool advance, const Place &place, const CallExtras &extras = {});

// The same with step counters on the device: no value is read by the host, so that a CUDA graph can
// hold the call. Rows that share a counter cannot advance it.
void adam_capturable(const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options,
                     double grad_scale, bool advance, const DeviceScalars &scalars, const Place &place,
                     const CallExtras &extras = {});

// Adds one to each float32 counter on the device, unless found_inf.
void advance_steps(const uint64_t *counters, int64_t n, uint64_t found_inf, const Place &place);

// A state that can be read and written as FP32; `root`: it holds square roots, as only formats with scales do.
bool has_format(int32_t format, bool root);
// `scale`, of a format that has scales, is that of the first element, which starts a block.
void decode(int32_t format, const void *from, float *to, int64_t n, const Place &place, uint64_t scale = 0,
            bool root = false);
void encode(int32_t format, const float *from, void *to, int64_t n, const Place &place, uint64_t scale = 0,
            bool root = false);
bool has_master(int32_t param_format, int32_t master_format);
void refresh_master(const void *weight, void *master, int64_t n, const Place &place, int32_t param_format = kBFloat16,
                    int32_t master_format = kFloat32, uint64_t scale = 0);

// Why the kernels cannot run on a device, as the end of a sentence; empty where they can.
std::string why_not(int device);

}  // namespace statestream
