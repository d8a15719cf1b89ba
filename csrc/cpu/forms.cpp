#include "forms.h"

#include <initializer_list>

namespace statestream {

const Form *const *supported_forms(int *count) {
  static const Form *found[4];
  static const int n = [] {
    int k = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    for (const Form *form : {&kAvx512Bf16Form, &kAvx512Form, &kAvx2Form})
      if (form->supported()) found[k++] = form;
#endif
    found[k++] = &kPortableForm;
    return k;
  }();
  *count = n;
  return found;
}

}  // namespace statestream
