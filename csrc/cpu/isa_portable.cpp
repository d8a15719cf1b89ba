#include "vector_portable.h"
// The vector comes first: the loops are written over it.
#include "convert_kernels.h"
#include "generic_kernel.h"

namespace statestream {
static bool supported() { return true; }
const Isa kPortableIsa = {"portable",    supported,     choose_adam,   GenericKernel::range,
                          choose_decode, choose_encode, choose_refresh};
}  // namespace statestream
