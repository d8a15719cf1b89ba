// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#if defined(__x86_64__)
#include "vector_avx512.h"
// The vector comes first: the loops are written over it.
#include "convert_kernels.h"
#include "generic_kernel.h"

namespace statestream {
static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Isa kAvx512Isa = {"avx512",      supported,     choose_adam,   GenericKernel::range,
                        choose_decode, choose_encode, choose_refresh};
}  // namespace statestream
#endif
