"""An optimizer whose parameters depend on each other: all of its state moves to the device, and back."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from statestream.adam.grad_scaling import is_skipped
from statestream.offload.host.store import compact_copy
from statestream.offload.per_parameter.infer_state import check_plain, is_host_scalar, unhooked_step
from statestream.offload.per_parameter.subset import Subset
from statestream.offload.strategy import Strategy
from statestream.tensors.local import local_of
from statestream.tensors.sharding import as_dtensor_like

__all__ = ["OnePassStrategy"]


class OnePassStrategy(Strategy):
    """Keeps whatever state `inner` makes in pageable host memory between steps. Nothing is known of it, so
    nothing overlaps and device memory is all of the state."""

    def __init__(self, inner: torch.optim.Optimizer, device: Any):
        super().__init__(inner, device, None)
        self.call = unhooked_step(inner)
        self._moved: dict[int, Tensor] = {}  # host tensors that the optimizer wants on the device
        self.adopt(dict(inner.state))

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        existing = existing or {}
        self.inner.state.update({key: self._to_host(state, self._name(key)) for key, state in existing.items()})

    def host_tensor(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """Host memory for a state that is loaded."""
        host = as_dtensor_like(local_of(value).to("cpu", copy=True), value)
        if value.dim():
            self._moved[id(host)] = host
        return host

    def detached(self) -> torch.optim.Optimizer:
        twin = super().detached()
        twin.state = defaultdict(dict)
        twin.state.update((key, compact_copy(state)) for key, state in self.inner.state.items())
        return twin

    @property
    def host_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in map(local_of, self._moved.values()))

    @property
    def device_bytes(self) -> int:
        return self.host_bytes

    def update(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        if is_skipped(found_inf):
            return
        inner = self.inner
        params = list({id(p): p for p in self.params() if p.grad is not None}.values())
        if not params:
            self.check_gradients()
        self.follow(params)
        hosts = dict(inner.state)
        with Subset(inner, self.call) as subset, self.device.computing():
            known = self._moved
            try:
                for key, state in hosts.items():
                    inner.state[key] = self._to_device(state)
                with subset.updating(params):
                    self.took(sum(t.nbytes for t in (*map(local_of, params), *self._on_device())))
                    self._moved = {}
                    new = {key: self._to_host(state, self._name(key)) for key, state in inner.state.items()}
            except BaseException:
                new, self._moved = hosts, known
                raise
            finally:
                inner.state.clear()
                inner.state.update(new)

    def _on_device(self) -> list[Tensor]:
        """State that the optimizer has there, local parts."""
        leaves = tree_leaves([dict(s) if isinstance(s, dict) else s for s in self.inner.state.values()])
        there = self.device.torch_device
        return [local_of(v) for v in leaves if isinstance(v, Tensor) and not is_host_scalar(v, there)]

    def _name(self, key: Any) -> str:
        return self.names().get(id(key), "a parameter in no group") if isinstance(key, Tensor) else repr(key)

    def _to_host(self, state: Any, name: str) -> Any:
        if isinstance(state, dict):
            for key, value in state.items():
                check_plain(value, key, name)

        def moved(value: Any) -> Any:
            if is_host_scalar(value, self.device.torch_device):
                return value
            host = as_dtensor_like(local_of(value).to("cpu"), value)
            self._moved[id(host)] = host
            return host

        return tree_map(moved, state)

    def _to_device(self, state: Any) -> Any:
        def moved(value: Any) -> Any:
            if id(value) in self._moved:
                return as_dtensor_like(local_of(value).to(self.device.torch_device, copy=True), value)
            return copy.deepcopy(value)

        return tree_map(moved, state)
