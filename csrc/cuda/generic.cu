// Launches of the generic kernels.
#include "generic.h"
#include "generic_convert.cuh"
#include "generic_kernel.cuh"
#include "launch.h"

namespace statestream {

GenericBatch::GenericBatch(const TableFormats &formats, const AdamOptions &options, uint64_t found_inf,
                           const CallExtras &extras, const Place &place)
    : options_(options), place_(place), parameters_(new GenericParameters), step_(NAN) {
  blocks_ = resident_blocks(generic_kernel, kGenericThreads);
  parameters_->found_inf = (const float *)found_inf;
  parameters_->seed = extras.seed;
  parameters_->formats = formats;
  parameters_->random = random_flags(formats, extras.stochastic);
  parameters_->rows = parameters_->chunks = 0;
}

GenericBatch::~GenericBatch() = default;

GenericRow &GenericBatch::place(const TensorRow &row, const RowExtras *extras) {
  const int64_t chunks = chunks_of(row.numel, kGenericBlockElements);
  if (chunks > INT32_MAX) throw std::invalid_argument("a tensor has more elements than any memory holds");
  if (parameters_->rows == kMaxGenericRows || parameters_->chunks + chunks > INT32_MAX) flush();
  GenericRow &placed = parameters_->row[parameters_->rows++];
  placed = {row.param, row.grad, row.exp_avg, row.exp_avg_sq, row.master, row.numel};
  if (extras) placed.extras = *extras;
  placed.first_chunk = parameters_->chunks;
  parameters_->chunks += (int32_t)chunks;
  return placed;
}

void GenericBatch::add(const TensorRow &row, const RowExtras *extras, float step, double grad_scale) {
  if (step != step_) scalars_ = adam_scalars(options_, step_ = step, grad_scale);
  GenericRow &placed = place(row, extras);
  placed.scalars = scalars_;
  placed.step = step;
}

void GenericBatch::add(const TensorRow &row, const RowExtras *extras, const AdamScalars<float> *scalars) {
  GenericRow &placed = place(row, extras);
  placed.device_scalars = scalars;
  placed.device_step = (const float *)row.step;
}

void GenericBatch::flush() {
  if (parameters_->rows)
    launch(generic_kernel, std::min<int64_t>(parameters_->chunks, blocks_), kGenericThreads, *parameters_, place_);
  parameters_->rows = parameters_->chunks = 0;
}

void generic_convert(const GenericConversion &conversion, int64_t n, const Place &place) {
  if (!n) return;
  set_device(place.device);
  const GenericConvertParameters a{conversion, n};
  const int64_t wanted = chunks_of(scale_blocks(n), kConvertWarps);
  launch(generic_convert_kernel, std::min(wanted, resident_blocks(generic_convert_kernel, kConvertThreads)),
         kConvertThreads, a, place);
}

}  // namespace statestream
