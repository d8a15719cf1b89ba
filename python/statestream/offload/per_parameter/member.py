"""One parameter that is stepped whole, and what its state is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from statestream.offload.per_parameter.infer_state import StateKind
from statestream.streaming.plan import padded_bytes
from statestream.tensors.local import is_dense, local_of

__all__ = ["Member"]


@dataclass
class Member:
    """A parameter and what its state is made of."""

    param: Tensor
    name: str
    kinds: dict[str, StateKind]
    bound: dict[str, Tensor] = field(default_factory=dict)
    """The state tensors in host memory, once there are any."""

    def __post_init__(self) -> None:
        local = local_of(self.param)
        self.shape, self.dtype = tuple(local.shape), local.dtype
        # Kept, for the state does not follow when the parameter's memory format changes later.
        self.stride = local.stride() if is_dense(local) else None

    @property
    def outgrown(self) -> bool:
        """Whether the parameter has changed since: what was planned for it does not fit any more."""
        local = local_of(self.param)
        return tuple(local.shape) != self.shape or local.dtype is not self.dtype

    @property
    def state_bytes(self) -> int:
        return sum(padded_bytes(k.numel, k.dtype.itemsize) for k in self.kinds.values())

    @property
    def undo_bytes(self) -> int:
        return padded_bytes(prod(self.shape), self.dtype.itemsize)

    def shaped(self, nbytes: Tensor, name: str) -> Tensor:
        """A stretch of memory as the state `name`: where it has the parameter's shape, with its strides."""
        kind = self.kinds[name]
        values = nbytes[: kind.numel * kind.dtype.itemsize].view(kind.dtype)
        if kind.shape == self.shape and self.stride is not None:
            return values.as_strided(self.shape, self.stride)
        return values.view(kind.shape)
