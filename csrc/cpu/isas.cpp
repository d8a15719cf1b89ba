#include "isas.h"

namespace statestream {

const std::vector<const Isa *> &supported_isas() {
  static const std::vector<const Isa *> found = [] {
    std::vector<const Isa *> isas;
#if defined(__x86_64__)
    __builtin_cpu_init();
    for (const Isa *isa : {&kAvx512Bf16Isa, &kAvx512Isa, &kAvx2Isa})
      if (isa->supported()) isas.push_back(isa);
#endif
    isas.push_back(&kPortableIsa);
    return isas;
  }();
  return found;
}

}  // namespace statestream
