// The Adam and AdamW update of one element (Kingma & Ba 2015; Loshchilov & Hutter 2019).
// Nothing else computes Adam: the CUDA kernel calls it with floats, the CPU kernel with vectors.
#pragma once
#include "number_formats.h"

namespace statestream {

// A param group's settings, in double as Python holds them.
struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  int32_t decoupled;  // 1: AdamW, weight decay on the weight; 0: Adam, L2 term in the gradient
  int32_t bias_correction;
  int32_t maximize;
};

// What one tensor's update needs, rounded to float once. Number is float, or a vector that holds
// one scalar in every lane.
template <class Number>
struct AdamScalars {
  Number grad_factor;   // 1 / grad_scale, negative to maximize: the sign changes no rounding
  Number weight_decay;  // L2 form only
  Number decay;         // 1 - lr * weight_decay, decoupled form only
  Number pull1, pull2;  // the moments' weights, of the nearer end: min(beta, 1 - beta)
  Number step_size;     // lr / (1 - beta1^t)
  Number inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^t)
  Number eps;
  bool l2;
  bool short1, short2;  // beta < 0.5: the moment is told from the gradient, which is nearer
};

// base^n by repeated squaring: libm's pow differs between host and device.
STATESTREAM_HD double integer_power(double base, uint64_t n) {
  double power = 1.0;
  for (; n; n >>= 1, base *= base)
    if (n & 1) power *= base;
  return power;
}

// `step` is the count that includes this update. lr is rounded to float first, as a tensor lr is.
STATESTREAM_HD AdamScalars<float> adam_scalars(const AdamOptions &o, float step, double grad_scale) {
  const double lr = (double)(float)o.lr;
  const uint64_t t = step > 0.0f ? (uint64_t)step : 0;
  const double bc1 = o.bias_correction ? 1.0 - integer_power(o.beta1, t) : 1.0;
  const double bc2 = o.bias_correction ? 1.0 - integer_power(o.beta2, t) : 1.0;
  AdamScalars<float> s;
  const float inv_grad_scale = (float)(1.0 / grad_scale);
  s.grad_factor = o.maximize ? -inv_grad_scale : inv_grad_scale;
  s.l2 = !o.decoupled && o.weight_decay != 0.0;
  s.weight_decay = (float)o.weight_decay;
  s.decay = o.decoupled ? (float)(1.0 - lr * o.weight_decay) : 1.0f;
  s.short1 = o.beta1 < 0.5;
  s.short2 = o.beta2 < 0.5;
  s.pull1 = (float)(s.short1 ? o.beta1 : 1.0 - o.beta1);
  s.pull2 = (float)(s.short2 ? o.beta2 : 1.0 - o.beta2);
  s.step_size = (float)(lr / bc1);
  s.inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2));
  s.eps = (float)o.eps;
  return s;
}

// p, m, v before storage rounding: the weight moves by the moments as computed, not as stored.
// The moments are in lerp form, m + (1 - beta) * (g - m): beta and 1 - beta rounded apart do not
// sum to one, and over thousands of steps v would drift. Below 0.5 it starts from the other end:
// m + (g - m) leaves of a small g after a large m nothing but rounding, and v == 0 under it.
// kLongMemory promises that neither beta is below 0.5, for kernels where the choice would cost registers.
// Returns the root of v, which is what formats with scales store of it.
template <bool kLongMemory = false, class Number>
STATESTREAM_HD Number adam_update(Number &p, Number g, Number &m, Number &v, const AdamScalars<Number> &s) {
  g = rn_mul(g, s.grad_factor);
  if (s.l2)
    g = rn_fma(s.weight_decay, p, g);
  else
    p = rn_mul(p, s.decay);
  if (!kLongMemory && s.short1)
    m = rn_fma(s.pull1, rn_sub(m, g), g);
  else
    m = rn_fma(s.pull1, rn_sub(g, m), m);
  if (!kLongMemory && s.short2) {
    const Number gg = rn_mul(g, g);
    v = rn_fma(s.pull2, rn_sub(v, gg), gg);
  } else {
    v = rn_fma(s.pull2, rn_fms(g, g, v), v);
  }
  const Number root = rn_sqrt(v);
  const Number denominator = rn_fma(root, s.inv_sqrt_bc2, s.eps);
  p = rn_fnma(s.step_size, rn_div(m, denominator), p);
  return root;
}

}  // namespace statestream
