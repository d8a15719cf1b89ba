// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#if defined(__x86_64__)
#include "vector_avx512.h"
// The vector comes first: the loops are written over it.
#include "form_kernels.h"

namespace statestream {
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Form kAvx512Form = {"avx512", supported, choose_adam, choose_decode, choose_encode, refresh_range};
}  // namespace statestream
#endif
