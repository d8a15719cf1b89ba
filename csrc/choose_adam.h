// The kernel of a combination of formats that has one of its own; null where the generic kernel serves.
//
// For both devices. Whoever includes it, inside a namespace without a name, has defined Float32, BFloat16, PlainWeight,
// MasterWeight and RemainderWeight, the type AdamFunction, and adam_function<Weight, Grad, Moment1, Moment2>.
template <class Weight, class Grad, class Moment1>
AdamFunction choose_moment2(int32_t format) {
  switch (format) {
    case statestream::kFloat32: return adam_function<Weight, Grad, Moment1, Float32>;
    case statestream::kBFloat16: return adam_function<Weight, Grad, Moment1, BFloat16>;
    default: return nullptr;
  }
}

template <class Weight, class Grad>
AdamFunction choose_moment1(const statestream::TableFormats &f) {
  switch (f.exp_avg) {
    case statestream::kFloat32: return choose_moment2<Weight, Grad, Float32>(f.exp_avg_sq);
    case statestream::kBFloat16: return choose_moment2<Weight, Grad, BFloat16>(f.exp_avg_sq);
    default: return nullptr;
  }
}

template <class Weight>
AdamFunction choose_grad(const statestream::TableFormats &f) {
  switch (f.grad) {
    case statestream::kFloat32: return choose_moment1<Weight, Float32>(f);
    case statestream::kBFloat16: return choose_moment1<Weight, BFloat16>(f);
    default: return nullptr;
  }
}

AdamFunction choose_adam(const statestream::TableFormats &f) {
  if (f.param == statestream::kFloat32 && f.master == statestream::kNone) return choose_grad<PlainWeight<Float32>>(f);
  if (f.param != statestream::kBFloat16) return nullptr;
  switch (f.master) {
    case statestream::kNone: return choose_grad<PlainWeight<BFloat16>>(f);
    case statestream::kFloat32: return choose_grad<MasterWeight>(f);
    case statestream::kRemainder: return choose_grad<RemainderWeight>(f);
    default: return nullptr;
  }
}
