"""What the ways of stepping an optimizer in parts have in common.

A way is a class over this one: AdamStrategy for FusedAdam, PerParameterStrategy for elementwise optimizers,
MuonStrategy for Muon, and OnePassStrategy for the rest. Each takes over the state of `inner`, has `adopt` for
parameters that were added, and `step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from statestream.adam.gradient_hooks import GradientHooks
from statestream.arguments import names_of
from statestream.device.queues import device_for
from statestream.offload.checks import check_streamed
from statestream.offload.host.store import StateStore
from statestream.offload.inner_hooks import InnerHooks, hooks_of_others, inner_hooks_of
from statestream.state.factory import check_not_torn
from statestream.tensors.local import local_of
from statestream.tensors.quantized import is_quantized

__all__ = ["Strategy"]


class Strategy(ABC):
    """`inner`'s state in a store, and the device that it is streamed to.

    `torn` names parameters that an error left updated in part, which only a device that refuses every further
    call can bring about, or a load that ended in an error in the middle. They are named until a load succeeds.
    """

    splits_parameters = False
    smallest = "parameters"
    """What the pieces that are never split are called in a warning."""

    def __init__(self, inner: torch.optim.Optimizer, device: Any, budget: int | None):
        self.inner, self.device = inner, device
        self.store = StateStore(device.memory, budget)
        self.hooks = GradientHooks(inner)
        self.inner_hooks = InnerHooks(self)
        self.torn: list[str] = []
        self.step_bytes: int | None = None
        """Device memory that the last step took for state, at its highest; None before the first."""

    def take_over_gradients(self) -> None:
        """From another optimizer that is still there and takes them, with a warning."""
        self.hooks.take_over(self.params(), self.names)

    def check_gradients(self) -> None:
        """RuntimeError where there are none because another optimizer takes them."""
        self.hooks.check(self.params(), self.names)

    def check_whole(self) -> None:
        """RuntimeError where any parameter is torn."""
        check_not_torn(self.torn)

    def took(self, nbytes: int) -> None:
        """Something of so many bytes is on the device, and nothing else that was told here."""
        self.step_bytes = max(self.step_bytes or 0, nbytes)

    @abstractmethod
    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        """Host memory for every trained parameter, and `existing` state moved there."""

    def drop(self, params: Iterable[Tensor]) -> None:
        """Gives back the memory of parameters that are in no group any more."""
        for param in params:
            self.inner.state.pop(param, None)
        self.store.keep(list(self.params()))

    @abstractmethod
    def update(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """What the optimizer's step does between its hooks. Nothing happens where `found_inf` is not zero."""

    def loaded(self) -> None:  # noqa: B027  most ways have nothing to do then
        """State and groups of a state dict are in their places."""

    def wait(self) -> None:
        """Until host memory holds what the last step made."""
        self.inner_hooks.wait()

    @property
    def in_charge(self) -> bool:
        """Whether the optimizer's state is here, and in no other such object."""
        return inner_hooks_of(self.inner) is self.inner_hooks

    def check_in_charge(self) -> None:
        if not self.in_charge:
            raise RuntimeError(
                f"another CPUOffloadOptimizer has taken over this {type(self.inner).__name__}; use that one"
            )

    def close(self) -> None:
        """Gives back hooks and memory. State is gone then, unless another has taken it over."""
        self.hooks.remove()
        if not self.in_charge:
            return
        self.inner_hooks.closed = True
        try:
            self.wait()
        finally:
            self.inner.state.clear()

    def detached(self) -> torch.optim.Optimizer:
        """A twin of `inner` as it would be had it never been offloaded, its state in memory of its own. Parameters
        are shared: it is there to be copied or pickled."""
        twin = object.__new__(type(self.inner))
        twin.__dict__.update(self.inner.__dict__)
        twin.__dict__.update(hooks_of_others(self.inner))
        twin.__dict__.pop("step", None)  # a scheduler's, which steps `inner`
        return twin

    def params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.inner.param_groups)

    def names(self) -> dict[int, str]:
        """What errors call each parameter, by id."""
        return names_of(self.inner.param_groups)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds state."""
        return self.store.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Host memory for gradients that backward offloads."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """Host memory that gradients and weights pass through."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Most state on the device at any moment of a step."""
        return self.store.plan.ring_bytes

    def follow(self, params: list[Tensor]) -> None:
        """Streams to where these parameters, which have gradients, are now: a model may have moved since. ValueError
        for several places, and for what cannot be streamed."""
        locals_ = list(map(local_of, params))
        for param, local in zip(params, locals_, strict=True):
            if is_quantized(local):
                check_streamed(local, self.names()[id(param)])
        devices = {local.device for local in locals_}
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {', '.join(sorted(map(str, devices)))}; those of one CPUOffloadOptimizer are "
                "on one device"
            )
        if devices and devices != {self.device.torch_device}:
            self.wait()
            self.device = device_for(devices.pop())
            self.device.memory.take_over(self.store.memory)
            self.store.memory = self.device.memory
