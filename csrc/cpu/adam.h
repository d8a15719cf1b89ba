// The CPU side of the tables: work shared out over threads, formats looked up, nothing of Python.
#pragma once
#include "forms.h"

namespace statestream {

// Adds one to each row's step counter, rows without elements included.
void advance_steps(const TensorRow *rows, int64_t n);

// Updates every row by its step counter as it stands.
void adam(const Form &form, const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options,
          double grad_scale, int threads);

void decode(const Form &form, int32_t format, const void *from, float *to, int64_t n, int threads);
void encode(const Form &form, int32_t format, const float *from, void *to, int64_t n, int threads);
void refresh_master(const Form &form, const uint16_t *weight, float *master, int64_t n, int threads);

}  // namespace statestream
