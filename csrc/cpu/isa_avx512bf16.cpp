// Compiled as isa_avx512.cpp, and with -mavx512bf16.
#if defined(__x86_64__)
#include "vector_avx512.h"
// The vector comes first: the loops are written over it.
#include "convert_kernels.h"
#include "generic_kernel.h"

namespace statestream {
static bool supported() { return kAvx512Isa.supported() && __builtin_cpu_supports("avx512bf16"); }
const Isa kAvx512Bf16Isa = {"avx512bf16",  supported,     choose_adam,   GenericKernel::range,
                            choose_decode, choose_encode, choose_refresh};
}  // namespace statestream
#endif
