"""Adam and AdamW in float64, from the papers, and the unit in which an FP32 result's error is told.

Kingma & Ba, "Adam: A Method for Stochastic Optimization", algorithm 1; Loshchilov & Hutter, "Decoupled
Weight Decay Regularization", algorithm 2, with torch's order (decay, then the step) and torch's L2 form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from statestream.kernels import AdamOptions


@dataclass
class Judged:
    """What one step should give, and for each result the magnitude whose ulp an error is counted in.

    A magnitude is that of the result had nothing in it cancelled: where terms cancel, the error that FP32
    must make is of the size of the terms, not of what is left of them.
    """

    weight: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    weight_magnitude: np.ndarray
    exp_avg_magnitude: np.ndarray
    exp_avg_sq_magnitude: np.ndarray


def adam_step(
    weight: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    options: AdamOptions,
    t: int,
    grad_scale: float = 1.0,
) -> Judged:
    """Step number t (the first is 1), in float64 throughout. lr is an FP32 number, as in a tensor lr."""
    theta, g, m, v = (np.asarray(x, np.float64) for x in (weight, grad, exp_avg, exp_avg_sq))
    alpha = float(np.float32(options.lr))
    beta1, beta2, lam = options.beta1, options.beta2, options.weight_decay

    g = g / grad_scale
    if options.maximize:
        g = -g
    g_magnitude, theta_magnitude = np.abs(g), np.abs(theta)
    if options.decoupled:
        theta = theta - alpha * lam * theta
    else:
        g_magnitude = g_magnitude + lam * np.abs(theta)
        g = g + lam * theta

    m_magnitude = beta1 * np.abs(m) + (1 - beta1) * g_magnitude
    v_magnitude = beta2 * v + (1 - beta2) * g_magnitude**2
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2

    m_unbias = 1 / (1 - beta1**t) if options.bias_correction else 1.0
    v_unbias = 1 / (1 - beta2**t) if options.bias_correction else 1.0
    per_m = alpha * m_unbias / (np.sqrt(v * v_unbias) + options.eps)
    return Judged(
        theta - per_m * m,
        m,
        v,
        np.maximum(theta_magnitude, per_m * m_magnitude),
        m_magnitude,
        v_magnitude,
    )


def ulps(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Errors of FP32 results, in FP32 units in the last place of `magnitude`."""
    return np.abs(got.astype(np.float64) - want) / np.spacing(magnitude.astype(np.float32)).astype(np.float64)
