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
  Number grad_factor;  // 1 / grad_scale, negative to maximize: the sign changes no rounding
  Number weight_decay;  // L2 form only
  Number decay;         // 1 - lr * weight_decay, decoupled form only
  Number one_minus_beta1, one_minus_beta2;
  Number step_size;     // lr / (1 - beta1^t)
  Number inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^t)
  Number eps;
  bool l2;
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
  s.one_minus_beta1 = (float)(1.0 - o.beta1);
  s.one_minus_beta2 = (float)(1.0 - o.beta2);
  s.step_size = (float)(lr / bc1);
  s.inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2));
  s.eps = (float)o.eps;
  return s;
}

// p, m, v before storage rounding: the weight moves by the moments as computed, not as stored.
// The moments are in lerp form, m + (1 - beta) * (g - m): beta and 1 - beta rounded apart do not
// sum to one, and over thousands of steps v would drift.
template <class Number>
STATESTREAM_HD void adam_update(Number &p, Number g, Number &m, Number &v, const AdamScalars<Number> &s) {
  g = rn_mul(g, s.grad_factor);
  if (s.l2)
    g = rn_fma(s.weight_decay, p, g);
  else
    p = rn_mul(p, s.decay);
  m = rn_fma(s.one_minus_beta1, rn_sub(g, m), m);
  v = rn_fma(s.one_minus_beta2, rn_fms(g, g, v), v);
  const Number denominator = rn_fma(rn_sqrt(v), s.inv_sqrt_bc2, s.eps);
  p = rn_fnma(s.step_size, rn_div(m, denominator), p);
}

}  // namespace statestream
