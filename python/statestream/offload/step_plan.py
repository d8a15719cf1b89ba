"""What a step of an offloaded optimizer takes, as numbers that can be asked for before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["StepPlan", "plan_of"]


@dataclass(frozen=True)
class StepPlan:
    """Bytes, on this rank.

    step_chunk_bytes: the bound that was asked for (None: one pass).
    device_bytes: most state, and gradients that were offloaded, on the device at any moment of a step; more than
        `step_chunk_bytes` where something that is stepped whole exceeds it by itself. Of an optimizer that is not
        FusedAdam, a copy of the parameters that are being stepped is part of it.
    host_bytes: host memory that holds state.
    gradient_bytes: host memory for gradients that backward offloads.
    staging_bytes: host memory that gradients and weights pass through, of the host's share and of backward.
    pinned_bytes: how much of all three is pinned.
    chunks: how many pieces the state moves in.
    alone: what exceeds `step_chunk_bytes` by itself, the largest first: the parameter's name, and bytes.
    """

    step_chunk_bytes: int | None
    device_bytes: int
    host_bytes: int
    gradient_bytes: int
    staging_bytes: int
    pinned_bytes: int
    chunks: int
    alone: tuple[tuple[str, int], ...]

    def complaint(self, kind: str) -> str:
        """Why the bound does not hold, with both numbers, for `kind` of pieces; empty if it holds."""
        if not self.alone:
            return ""
        name, nbytes = self.alone[0]
        return (
            f"{len(self.alone)} {kind} need more than step_chunk_bytes={self.step_chunk_bytes} by themselves, the "
            f"largest {nbytes} bytes ({name}); each is stepped alone, and that is the bound"
        )


def plan_of(strategy: Any) -> StepPlan:
    """The plan of a Strategy (strategy.py)."""
    store, names = strategy.store, strategy.names()
    params = [param for bank in store.banks for param in bank.units]
    alone = []
    if not strategy.splits_parameters:
        for chunk in store.plan.chunks:
            if chunk.pieces[0].unit in store.plan.oversize:
                first = names.get(id(params[chunk.pieces[0].unit]), "a parameter that is gone")
                more = len(chunk.pieces) - 1
                alone.append((f"{first} and {more} with it" if more else first, chunk.nbytes))
    alone.sort(key=lambda each: -each[1])
    return StepPlan(
        step_chunk_bytes=store.budget,
        device_bytes=strategy.device_bytes,
        host_bytes=strategy.host_bytes,
        gradient_bytes=strategy.gradient_bytes,
        staging_bytes=strategy.staging_bytes,
        pinned_bytes=strategy.device.memory.pinned_bytes,
        chunks=len(store.plan.chunks),
        alone=tuple(alone),
    )
