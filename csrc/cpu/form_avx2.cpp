// Compiled with -mavx2 -mfma.
#if defined(__x86_64__)
#include "vector_avx2.h"
// The vector comes first: the loops are written over it.
#include "form_kernels.h"

namespace statestream {
static bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
const Form kAvx2Form = {"avx2", supported, choose_adam, choose_decode, choose_encode, refresh_range};
}  // namespace statestream
#endif
