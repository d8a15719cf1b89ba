// Chooses the kernel that is compiled for a combination of formats. Null: there is none, and the generic kernel runs.
//
// Both devices include this inside an unnamed namespace. Before it they define Float32, BFloat16, PlainWeight,
// MasterWeight, RemainderWeight, the type AdamFunction, and adam_function<Weight, Grad, Moment1, Moment2>.
template <class Weight, class... Streams>
AdamFunction choose_streams(const int32_t *formats) {
  if constexpr (sizeof...(Streams) == 3) {
    return adam_function<Weight, Streams...>;
  } else {
    switch (*formats) {
      case statestream::kFloat32: return choose_streams<Weight, Streams..., Float32>(formats + 1);
      case statestream::kBFloat16: return choose_streams<Weight, Streams..., BFloat16>(formats + 1);
      default: return nullptr;
    }
  }
}

AdamFunction choose_adam(const statestream::TableFormats &f) {
  const int32_t streams[] = {f.grad, f.exp_avg, f.exp_avg_sq};
  if (f.param == statestream::kFloat32 && f.master == statestream::kNone)
    return choose_streams<PlainWeight<Float32>>(streams);
  if (f.param != statestream::kBFloat16) return nullptr;
  switch (f.master) {
    case statestream::kNone: return choose_streams<PlainWeight<BFloat16>>(streams);
    case statestream::kFloat32: return choose_streams<MasterWeight>(streams);
    case statestream::kRemainder: return choose_streams<RemainderWeight>(streams);
    default: return nullptr;
  }
}
