"""The optimizers that the tests put in host memory."""

from __future__ import annotations

import torch
from statestream import FusedAdam

OPTIMIZERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "fused_adam_l2": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False, maximize=True),
    "fused_adam_masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "fused_adam_remainders": lambda p: FusedAdam(p, lr=0.1, master_weights=True, store_param_remainders=True),
    "fused_adam_fp8": lambda p: FusedAdam(p, lr=0.1, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"),
    "fused_adam_fp16_masters": lambda p: FusedAdam(
        p, lr=0.1, master_weights=True, master_weight_dtype="fp16", exp_avg_dtype="fp16", exp_avg_sq_dtype="bf16"
    ),
    "fused_adam_by_random_bits": lambda p: FusedAdam(
        p, lr=0.1, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16", stochastic_rounding=True, seed=5
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}
"""Of parameters, by name: FusedAdam's forms, and torch's elementwise optimizers."""


class SignDescent(torch.optim.Optimizer):
    """A third party's: momentum made at once, updates counted in the group and on itself, may be told to fail."""

    def __init__(self, params, lr=0.1):
        self.calls, self.fail_at = 0, None
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                if self.fail_at is not None and p.numel() == self.fail_at:
                    p.add_(1000.0)
                    self.state[p]["momentum"].fill_(float("nan"))
                    raise ArithmeticError("told to fail")
                momentum = self.state[p]["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(momentum.sign() * group["lr"] / group["step"])
