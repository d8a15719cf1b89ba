#include "vector_portable.h"
// The vector comes first: the loops are written over it.
#include "form_kernels.h"

namespace statestream {
static bool supported() { return true; }
const Form kPortableForm = {"portable", supported, choose_adam, choose_decode, choose_encode, refresh_range};
}  // namespace statestream
