"""A program: a model, an optimizer and a list of operations, all from a seed.

Each operation and each parameter draws from a generator of its own, so that any of them can be left out and the rest
stay what they are. That is how a failure is made smaller.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from .formats import BF16, FP8, FP16, FP32
from .reference import Form

__all__ = ["OPERATIONS", "Program", "Setup"]

OPERATIONS = {
    "step": 12,
    "skip": 1,
    "step_without_gradients": 1,
    "edit_settings": 3,
    "write_weights": 3,
    "save": 3,
    "load": 4,
    "reload": 1,
    "through_dcp": 1,
    "add_group": 1,
    "duplicate": 2,
    "move": 4,
    "freeze": 1,
    "unfreeze": 1,
    "wrap": 2,
}
"""How often each is drawn."""

MOST_OPERATIONS, MOST_PARAMS = 14, 5


@dataclass(frozen=True)
class Setup:
    """What FusedAdam is built with. Everything else is an operation's choice."""

    form: Form
    dtypes: tuple[torch.dtype, ...]
    groups: int
    to_host: bool
    staging_bytes: int
    decoupled_grad: bool
    decoupled_decay: bool
    named: bool
    tensor_lr: bool
    listed_twice: bool


@dataclass(frozen=True)
class Program:
    """The seed's program, or what is left of it: numbers of operations and of parameters. None: all."""

    seed: int
    operations: tuple[int, ...] | None = None
    params: tuple[int, ...] | None = None

    def random(self, *path: int | str) -> random.Random:
        return random.Random(f"{self.seed} {path}")

    def values(self, *path: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *path])

    @cached_property
    def kept_operations(self) -> tuple[int, ...]:
        count = self.random("length").randint(3, MOST_OPERATIONS)
        return tuple(range(count)) if self.operations is None else self.operations

    @cached_property
    def kept_params(self) -> tuple[int, ...]:
        count = self.random("params").randint(1, MOST_PARAMS)
        return tuple(range(count)) if self.params is None else self.params

    def name(self, operation: int) -> str:
        return self.random("operation", operation).choices(list(OPERATIONS), list(OPERATIONS.values()))[0]

    @cached_property
    def setup(self) -> Setup:
        draw = self.random("setup")
        capturable = draw.random() < 0.1
        masters = (None, "fp32", "fp16") if capturable else (None, "fp32", "fp16", "remainders", "remainders")
        moments = (FP32, BF16, FP16, FP8)
        form = Form(
            exp_avg=draw.choice(moments),
            exp_avg_sq=draw.choice(moments),
            master=draw.choice(masters),
            stochastic=draw.random() < 0.3,
            seed=draw.choice((0, 1, draw.getrandbits(64))),
            capturable=capturable,
        )
        return Setup(
            form,
            dtypes=draw.choice(((FP32,), (BF16,), (BF16,), (FP16,), (FP32, BF16), (FP32, BF16, FP16))),
            groups=draw.randint(1, 3),
            to_host=draw.random() < 0.5,
            staging_bytes=draw.choice((2048, 4096, 1 << 26)),
            decoupled_grad=draw.random() < 0.25,
            decoupled_decay=draw.random() < 0.7,
            named=draw.random() < 0.2,
            tensor_lr=draw.random() < 0.2,
            listed_twice=draw.random() < 0.05,
        )

    def without(self, *, operations: set[int] = frozenset(), params: set[int] = frozenset()) -> Program:
        """The same with these left out."""
        return replace(
            self,
            operations=tuple(i for i in self.kept_operations if i not in operations),
            params=tuple(i for i in self.kept_params if i not in params),
        )

    def __str__(self) -> str:
        """As the command line takes it."""
        parts = [str(self.seed)]
        for flag, kept in (("--operations", self.operations), ("--params", self.params)):
            if kept is not None:
                parts.append(f"{flag} {','.join(map(str, kept))}")
        return " ".join(parts)
