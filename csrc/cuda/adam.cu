// From a table to launches: rows packed into kernel parameters, as many a launch as they hold.
#include <memory>
#include <vector>

#include "adam_kernel.cuh"
#include "generic.h"
#include "launch.h"

namespace statestream {
namespace {

// The parameter as the kernels declare it (the emulation declares it a reference).
using AdamKernel = void(const AdamParameters __grid_constant__);

using AdamFunction = AdamKernel *;
template <class Weight, class Grad, class Moment1, class Moment2>
constexpr AdamFunction adam_function = adam_kernel<Weight, Grad, Moment1, Moment2>;

#include "../choose_adam.h"

// Elements before the first at which every pointer of the row is 16-byte aligned.
int16_t head_of(const TensorRow &r, const TableFormats &f) {
  const auto aligned = [](uint64_t address, int32_t format, int64_t i) {
    return (address + (uint64_t)(i * format_bytes(format))) % 16 == 0;
  };
  for (int64_t i = 0; i < kVector; ++i)
    if (aligned(r.param, f.param, i) && aligned(r.grad, f.grad, i) && aligned(r.exp_avg, f.exp_avg, i) &&
        aligned(r.exp_avg_sq, f.exp_avg_sq, i) && (!f.master || aligned(r.master, f.master, i)))
      return (int16_t)std::min(i, r.numel);
  return kUnalignable;
}

// Rows on their way into one launch.
class Batch {
 public:
  Batch(const TableFormats &formats, const AdamOptions &options, uint64_t found_inf, const Place &place)
      : formats_(formats),
        options_(options),
        place_(place),
        kernel_(choose_adam(formats)),
        parameters_(new AdamParameters) {
    if (!kernel_) throw std::invalid_argument("no CUDA kernel for these formats");
    blocks_ = resident_blocks(kernel_, kThreads);
    parameters_->found_inf = (const float *)found_inf;
    clear();
  }

  // With scalars formed on the host, which rows of equal step counts share.
  void add(const TensorRow &row, float step, double grad_scale) {
    if (full(row)) flush();
    auto known = std::find(steps_.begin(), steps_.end(), step);
    if (known == steps_.end()) {
      if (steps_.size() == kMaxScalars) flush();
      parameters_->scalars[steps_.size()] = adam_scalars(options_, step, grad_scale);
      steps_.push_back(step);
      known = steps_.end() - 1;
    }
    push(row, known - steps_.begin());
  }

  // With scalars that step_kernel forms at an address on the device.
  void add(const TensorRow &row, const AdamScalars<float> *scalars) {
    if (full(row) || (parameters_->rows && scalars - parameters_->device_scalars > UINT16_MAX)) flush();
    if (!parameters_->rows) parameters_->device_scalars = scalars;
    push(row, scalars - parameters_->device_scalars);
  }

  void flush() {
    if (parameters_->rows)
      launch(kernel_, std::min<int64_t>(parameters_->chunks, blocks_), kThreads, *parameters_, place_);
    clear();
  }

 private:
  // A row has a chunk even where all its elements are in its head.
  static int64_t chunks_in(const TensorRow &row, int16_t head) {
    return std::max<int64_t>(1, chunks_of(row.numel - std::max<int64_t>(head, 0), kBlockElements));
  }

  bool full(const TensorRow &row) const {
    return parameters_->rows == kMaxRows || parameters_->chunks + chunks_in(row, 0) > INT32_MAX;
  }

  void push(const TensorRow &row, int64_t scalars) {
    // The wide path is compiled for long memories (adam_update<true>).
    const bool wide = options_.beta1 >= 0.5 && options_.beta2 >= 0.5;
    const int16_t head = wide ? head_of(row, formats_) : (int16_t)kUnalignable;
    const int64_t chunks = chunks_in(row, head);
    if (chunks > INT32_MAX) throw std::invalid_argument("a tensor has more elements than any memory holds");
    parameters_->row[parameters_->rows++] = {row.param,           row.grad,   row.exp_avg,
                                             row.exp_avg_sq,      row.master, row.numel,
                                             parameters_->chunks, head,       (uint16_t)scalars};
    parameters_->chunks += (int32_t)chunks;
  }

  void clear() {
    parameters_->device_scalars = nullptr;
    parameters_->rows = parameters_->chunks = 0;
    steps_.clear();
  }

  const TableFormats formats_;
  const AdamOptions options_;
  const Place place_;
  AdamKernel *const kernel_;
  int64_t blocks_;
  std::unique_ptr<AdamParameters> parameters_;
  std::vector<float> steps_;  // whose scalars the parameters hold
};

bool is_generic(const TableFormats &formats, const CallExtras &extras) {
  return extras.stochastic || !choose_adam(formats);
}

const RowExtras *extras_of(const CallExtras &extras, int64_t i) { return extras.rows ? extras.rows + i : nullptr; }

void launch_steps(StepParameters &a, const Place &place) {
  launch(step_kernel, chunks_of(a.steps, kThreads), kThreads, a, place);
}

// Advances the counters on the device and forms the scalars of each row at device.scratch.
void form_scalars(const TensorRow *rows, int64_t n, const AdamOptions &options, double grad_scale, bool advance,
                  const DeviceScalars &device, const Place &place) {
  std::unique_ptr<StepParameters> a(new StepParameters);
  a->options = options;
  a->grad_scale = grad_scale;
  a->lr = (const float *)device.lr;
  a->grad_factor = (const float *)device.grad_scale;
  a->found_inf = (const float *)device.found_inf;
  a->advance = advance;
  for (int64_t i = 0; i < n; i += kMaxSteps) {
    a->steps = (int32_t)std::min<int64_t>(kMaxSteps, n - i);
    a->scalars = (AdamScalars<float> *)device.scratch + i;
    for (int32_t k = 0; k < a->steps; ++k) a->step[k] = rows[i + k].step;
    launch_steps(*a, place);
  }
}

}  // namespace

cudaError_t image_error() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, step_kernel);
}

void adam(const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options, double grad_scale,
          bool advance, const Place &place, const CallExtras &extras) {
  set_device(place.device);
  if (is_generic(formats, extras)) {
    GenericBatch batch(formats, options, 0, extras, place);
    if (advance) advance_host_steps(rows, n);
    for (int64_t i = 0; i < n; ++i)
      if (rows[i].numel) batch.add(rows[i], extras_of(extras, i), *(const float *)rows[i].step, grad_scale);
    return batch.flush();
  }
  Batch batch(formats, options, 0, place);
  if (advance) advance_host_steps(rows, n);
  for (int64_t i = 0; i < n; ++i)
    if (rows[i].numel) batch.add(rows[i], *(const float *)rows[i].step, grad_scale);
  batch.flush();
}

void adam_capturable(const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options,
                     double grad_scale, bool advance, const DeviceScalars &device, const Place &place,
                     const CallExtras &extras) {
  set_device(place.device);
  const auto *scalars = (const AdamScalars<float> *)device.scratch;
  if (is_generic(formats, extras)) {
    GenericBatch batch(formats, options, device.found_inf, extras, place);
    form_scalars(rows, n, options, grad_scale, advance, device, place);
    for (int64_t i = 0; i < n; ++i)
      if (rows[i].numel) batch.add(rows[i], extras_of(extras, i), scalars + i);
    return batch.flush();
  }
  Batch batch(formats, options, device.found_inf, place);
  form_scalars(rows, n, options, grad_scale, advance, device, place);
  for (int64_t i = 0; i < n; ++i)
    if (rows[i].numel) batch.add(rows[i], scalars + i);
  batch.flush();
}

void advance_steps(const uint64_t *counters, int64_t n, uint64_t found_inf, const Place &place) {
  set_device(place.device);
  std::unique_ptr<StepParameters> a(new StepParameters());
  a->found_inf = (const float *)found_inf;
  a->advance = 1;
  for (int64_t i = 0; i < n; i += kMaxSteps) {
    a->steps = (int32_t)std::min<int64_t>(kMaxSteps, n - i);
    std::copy(counters + i, counters + i + a->steps, a->step);
    launch_steps(*a, place);
  }
}

}  // namespace statestream
