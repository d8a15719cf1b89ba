// This package's own threads, so that its speed does not hang on OMP_NUM_THREADS or torch's pool.
#pragma once
#include <stdint.h>

#include <functional>

namespace statestream {

// Calls work(i) for every i in [0, tasks), each once, on up to `threads` threads, this one among
// them; returns when all are done. Each task runs with the default floating-point environment (round
// to nearest, denormals kept), whatever the calling thread set. Calls from several threads queue.
// After a fork the child starts threads of its own.
void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)> &work);

}  // namespace statestream
