"""Two runs bit for bit: weights, moments, masters and step counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from statestream.demo.training import Training
from statestream.state.stored import Stored
from statestream.tensors.local import local_of

__all__ = ["Difference", "Snapshot", "differences"]

Snapshot = dict[str, dict[str, Tensor]]
"""kind ("weights", "exp_avg", ...) -> parameter name -> values, in host memory."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How many of a tensor's elements differ in any bit."""

    kind: str
    name: str
    elements: int
    of: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}: {self.elements:,} of {self.of:,} elements"


def snapshot(training: Training) -> Snapshot:
    """Copies of all that the next step depends on, as it is stored: no export is involved. Of states in blocks with
    scales the FP32 values: a load may store the same values with another scale. Of DTensors this rank's part."""
    kept: Snapshot = {"weights": {}}
    for name, param in training.model.named_parameters():
        kept["weights"][name] = local_of(param.detach()).to("cpu", copy=True)
        state = training.optimizer.state[param]
        for kind, value in training.optimizer.backend.all_stored(param, state).items():
            kept.setdefault(kind, {})[name] = _values(value).detach().to("cpu", copy=True)
    for i, group in enumerate(training.optimizer.param_groups):
        count = torch.as_tensor(group["step"], dtype=torch.int64, device="cpu")
        kept.setdefault("group step", {})[f"group {i}"] = count
    return kept


def _values(state: Tensor | Stored) -> Tensor:
    if not isinstance(state, Stored):
        return local_of(state)
    return state.local if state.scale is None else state.values()


def differences(left: Snapshot, right: Snapshot) -> list[Difference]:
    """Every tensor that is not the same, or is in one run only, or has another shape or dtype."""
    found = []
    for kind in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(kind, {}), right.get(kind, {})
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None or a.shape != b.shape or a.dtype is not b.dtype:
                size = max(t.numel() for t in (a, b) if t is not None)
                found.append(Difference(kind, name, size, size))
                continue
            unequal = int((_bits(a) != _bits(b)).sum())
            if unequal:
                found.append(Difference(kind, name, unequal, a.numel()))
    return found


def _bits(tensor: Tensor) -> Tensor:
    # As integers: NaN equals itself, and -0.0 is not 0.0.
    return tensor.contiguous().view(_BITS[tensor.element_size()])
