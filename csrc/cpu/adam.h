// The CPU side of the tables: work shared out over threads, formats looked up, nothing of Python.
#pragma once
#include "isas.h"

namespace statestream {

// Updates every row by its step counter as it stands.
void adam(const Isa &isa, const TableFormats &formats, const TensorRow *rows, int64_t n, const AdamOptions &options,
          double grad_scale, int threads, const CallExtras &extras = {});

// Of a scaled format, `scale` is the first element's and the first element starts a block. `root`: the
// format holds square roots.
void decode(const Isa &isa, int32_t format, const void *from, float *to, int64_t n, int threads,
            const float *scale = nullptr, bool root = false);
void encode(const Isa &isa, int32_t format, const float *from, void *to, int64_t n, int threads, float *scale = nullptr,
            bool root = false);
void refresh_master(const Isa &isa, const void *weight, void *master, int64_t n, int threads,
                    int32_t param_format = kBFloat16, int32_t master_format = kFloat32, float *scale = nullptr);

}  // namespace statestream
