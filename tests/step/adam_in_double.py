"""Adam in float64, from the papers, with a bound on what FP32 arithmetic and storage may add.

Adam: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1. Decoupled weight
decay: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Judged", "Settings", "one_update"]

_UNIT = 2.0**-24
"""Largest relative error of one FP32 rounding."""


@dataclass(frozen=True)
class Settings:
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True
    bias_correction: bool = True
    maximize: bool = False


@dataclass(frozen=True)
class Judged:
    """Values that exact arithmetic gives, and how far FP32 arithmetic may be from each."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight_error: Tensor
    exp_avg_error: Tensor
    exp_avg_sq_error: Tensor


def one_update(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, t: int, s: Settings) -> Judged:
    """Update number `t` (from 1) of values as they are stored; all tensors of any float dtype."""
    weight, grad, m, v = (x.double() for x in (weight, grad, exp_avg, exp_avg_sq))
    beta1, beta2 = s.betas
    if s.maximize:
        grad = -grad
    grad_error = torch.zeros_like(grad)
    if s.weight_decay and not s.adam_w_mode:
        penalty = s.weight_decay * weight
        grad = grad + penalty
        grad_error = 3 * _UNIT * (grad.abs() + penalty.abs())
    m_new = beta1 * m + (1 - beta1) * grad
    v_new = beta2 * v + (1 - beta2) * grad**2
    m_error = 3 * _UNIT * (m.abs() + grad.abs()) + (1 - beta1) * grad_error
    v_error = 4 * _UNIT * (v + grad**2) + 2 * (1 - beta2) * grad.abs() * grad_error + 2.0**-149

    m_hat = m_new / (1 - beta1**t) if s.bias_correction else m_new
    v_hat = v_new / (1 - beta2**t) if s.bias_correction else v_new
    denominator = v_hat.sqrt() + s.eps
    update = s.lr * m_hat / denominator
    # Relative errors of numerator and denominator, and of the operations that follow.
    relative = 0.5 * v_error / v_new.clamp_min(2.0**-149) + 8 * _UNIT
    m_share = m_error / (1 - beta1**t) if s.bias_correction else m_error
    update_error = s.lr * m_share / denominator + update.abs() * relative
    decayed = weight * (1 - s.lr * s.weight_decay) if s.adam_w_mode else weight
    weight_new = decayed - update
    weight_error = 2 * _UNIT * (weight.abs() + weight_new.abs()) + update_error + 2.0**-149
    return Judged(weight_new, m_new, v_new, weight_error, m_error, v_error)
