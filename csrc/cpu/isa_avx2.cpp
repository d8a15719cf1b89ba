// Compiled with -mavx2 -mfma.
#if defined(__x86_64__)
#include "vector_avx2.h"
// The vector comes first: the loops are written over it.
#include "convert_kernels.h"
#include "generic_kernel.h"

namespace statestream {
static bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
const Isa kAvx2Isa = {"avx2",        supported,     choose_adam,   GenericKernel::range,
                      choose_decode, choose_encode, choose_refresh};
}  // namespace statestream
#endif
