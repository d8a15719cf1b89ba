// The hot loops of the update, over whichever Vector the including file chose. Everything here has internal linkage:
// the linker must never take the code of one instruction set for another's.
#pragma once
#include <type_traits>

#include "isas.h"

namespace {

using statestream::AdamScalars;
using statestream::TableFormats;
using statestream::TensorRow;
using statestream::with_format;
constexpr int kWidth = Vector::kWidth;

struct Float32 {
  using Type = float;
  STATESTREAM_INLINE static Vector load(const float *from) { return load_float32(from); }
  STATESTREAM_INLINE static void store(float *to, Vector a) { store_float32(to, a); }
};

struct BFloat16 {
  using Type = uint16_t;
  STATESTREAM_INLINE static Vector load(const uint16_t *from) { return load_bfloat16(from); }
  STATESTREAM_INLINE static void store(uint16_t *to, Vector a) { store_bfloat16(to, a); }
};

// What reads and writes a state that has no scales.
template <int32_t kFormat>
using VectorsOf = std::conditional_t<kFormat == statestream::kFloat32, Float32,
                                     std::conditional_t<kFormat == statestream::kBFloat16, BFloat16, void>>;

// How the weight is kept: by itself, as an FP32 master beside it, or as its low 16 bits beside it.
template <class Format>
struct PlainWeight {
  using Param = typename Format::Type;
  using Master = char;  // none
  static constexpr bool kHasMaster = false;
  STATESTREAM_INLINE static Vector load(const Param *param, const Master *) { return Format::load(param); }
  STATESTREAM_INLINE static void store(Param *param, Master *, Vector p) { Format::store(param, p); }
};

struct MasterWeight {
  using Param = uint16_t;
  using Master = float;
  static constexpr bool kHasMaster = true;
  STATESTREAM_INLINE static Vector load(const Param *, const Master *master) { return load_float32(master); }
  STATESTREAM_INLINE static void store(Param *param, Master *master, Vector p) {
    store_float32(master, p);
    store_bfloat16(param, p);
  }
};

struct RemainderWeight {
  using Param = uint16_t;
  using Master = uint16_t;
  static constexpr bool kHasMaster = true;
  STATESTREAM_INLINE static Vector load(const Param *param, const Master *low) { return join_masters(param, low); }
  STATESTREAM_INLINE static void store(Param *param, Master *low, Vector p) { split_masters(param, low, p); }
};

STATESTREAM_INLINE AdamScalars<Vector> splat_scalars(const AdamScalars<float> &s) {
  return {
      splat(s.grad_factor),  splat(s.weight_decay), splat(s.decay), splat(s.pull1), splat(s.pull2), splat(s.step_size),
      splat(s.inv_sqrt_bc2), splat(s.eps),          s.l2,           s.short1,       s.short2};
}

// The processor foresees a stream to the end of its page at most, and begins anew in the next one. Half a page
// further on brings what the next page begins with in time, and does not meet the streams' own lines in the cache.
constexpr int kPrefetchBytes = 2048, kLineBytes = 64;
// Elements between two requests: a line of the smallest type.
constexpr int kPrefetched = 32;

template <class Element>
STATESTREAM_INLINE void prefetch_ahead(const Element *from) {
  for (int k = 0; k < kPrefetched * (int)sizeof(Element); k += kLineBytes)
    __builtin_prefetch((const char *)from + kPrefetchBytes + k);
}

template <class Weight, class Grad, class Moment1, class Moment2>
struct AdamKernel {
  struct Pointers {
    typename Weight::Param *param;
    const typename Grad::Type *grad;
    typename Moment1::Type *exp_avg;
    typename Moment2::Type *exp_avg_sq;
    typename Weight::Master *master;
  };

  STATESTREAM_INLINE static void update(const Pointers &a, const AdamScalars<Vector> &s) {
    Vector p = Weight::load(a.param, a.master);
    Vector m = Moment1::load(a.exp_avg);
    Vector v = Moment2::load(a.exp_avg_sq);
    statestream::adam_update(p, Grad::load(a.grad), m, v, s);
    Weight::store(a.param, a.master, p);
    Moment1::store(a.exp_avg, m);
    Moment2::store(a.exp_avg_sq, v);
  }

  STATESTREAM_INLINE static Pointers at(const TensorRow &row, int64_t i) {
    return {(typename Weight::Param *)row.param + i, (const typename Grad::Type *)row.grad + i,
            (typename Moment1::Type *)row.exp_avg + i, (typename Moment2::Type *)row.exp_avg_sq + i,
            Weight::kHasMaster ? (typename Weight::Master *)row.master + i : nullptr};
  }

  // Of kPrefetched elements, and perhaps beyond the tensor's end, where it does no harm.
  STATESTREAM_INLINE static void prefetch(const Pointers &a) {
    prefetch_ahead(a.param);
    prefetch_ahead(a.grad);
    prefetch_ahead(a.exp_avg);
    prefetch_ahead(a.exp_avg_sq);
    if (Weight::kHasMaster) prefetch_ahead(a.master);
  }

  // Fewer than kWidth elements: through a padded copy, so that they take the same instructions.
  static void update_tail(const TensorRow &row, const AdamScalars<Vector> &s, int64_t i, int64_t n) {
    typename Weight::Param param[kWidth] = {};
    typename Grad::Type grad[kWidth] = {};
    typename Moment1::Type exp_avg[kWidth] = {};
    typename Moment2::Type exp_avg_sq[kWidth] = {};
    typename Weight::Master master[kWidth] = {};
    const Pointers a = at(row, i);
    memcpy(param, a.param, n * sizeof *param);
    memcpy(grad, a.grad, n * sizeof *grad);
    memcpy(exp_avg, a.exp_avg, n * sizeof *exp_avg);
    memcpy(exp_avg_sq, a.exp_avg_sq, n * sizeof *exp_avg_sq);
    if (Weight::kHasMaster) memcpy(master, a.master, n * sizeof *master);
    update({param, grad, exp_avg, exp_avg_sq, master}, s);
    memcpy(a.param, param, n * sizeof *param);
    memcpy(a.exp_avg, exp_avg, n * sizeof *exp_avg);
    memcpy(a.exp_avg_sq, exp_avg_sq, n * sizeof *exp_avg_sq);
    if (Weight::kHasMaster) memcpy(a.master, master, n * sizeof *master);
  }

  static void range(const TensorRow &row, const AdamScalars<float> &scalars, int64_t begin, int64_t end) {
    const AdamScalars<Vector> s = splat_scalars(scalars);
    int64_t i = begin;
    for (; i + kPrefetched <= end; i += kPrefetched) {
      prefetch(at(row, i));
      for (int k = 0; k < kPrefetched; k += kWidth) update(at(row, i + k), s);
    }
    for (; i + kWidth <= end; i += kWidth) update(at(row, i), s);
    if (i < end) update_tail(row, s, i, end - i);
  }
};

using AdamFunction = statestream::AdamRange;
template <class Weight, class Grad, class Moment1, class Moment2>
constexpr AdamFunction adam_function = AdamKernel<Weight, Grad, Moment1, Moment2>::range;

#include "../choose_adam.h"

}  // namespace
