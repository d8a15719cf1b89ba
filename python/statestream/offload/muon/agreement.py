"""Two promises of a Muon plan: its units partition the parameters, and every rank has made the same one.

A rank that cut at other places would wait in a collective that the others never enter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from statestream.streaming.plan import Plan
from statestream.tensors.local import is_dtensor

__all__ = ["check_partition", "check_same_plan", "describe", "joined"]


def joined(batches: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The `count` parameters as runs that are stepped whole: those that share a batch, directly or through a packed
    parameter that is in several, are one run. Runs and parameters within them keep their order."""
    root = list(range(count))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for batch in batches:
        for i in batch:
            a, b = find(batch[0]), find(i)
            root[max(a, b)] = min(a, b)
    runs: dict[int, list[int]] = {}
    for i in range(count):
        runs.setdefault(find(i), []).append(i)
    return list(runs.values())


def check_partition(plan: Plan, units: Sequence[Hashable], params: Mapping[Hashable, str]) -> None:
    """RuntimeError unless each of `params` is exactly one of `units`, and each unit in exactly one chunk, whole.

    `units` are the keys of parameters in the order of the plan, `params` maps each key to a name. A unit of none of
    these is of a parameter that has left the optimizer, and is never stepped. Linear in their number.
    """
    times = Counter(units[piece.unit] for chunk in plan.chunks for piece in chunk.pieces)
    wrong = [f"{name} {times[key]} times" for key, name in params.items() if times[key] != 1]
    if wrong:
        raise RuntimeError(
            f"a step would update {', '.join(wrong[:10])} instead of once: the units of the plan do not partition the "
            "parameters; this is a fault of statestream, or of an optimizer that it takes for another"
        )


def describe(plan: Plan, params: Sequence[Tensor | None]) -> str:
    """The plan in words, from what every rank knows alike: `params`, in the order of the plan, by global shape,
    placements and dtype. One line a chunk."""
    lines = []
    for number, chunk in enumerate(plan.chunks):
        kinds: dict[str, int] = {}
        for piece in chunk.pieces:
            param = params[piece.unit]
            if param is None:  # its state lies elsewhere by now; the bytes of the chunk tell
                continue
            where = f" {tuple(map(str, param.placements))}" if is_dtensor(param) else ""
            kind = f"{'x'.join(map(str, param.shape))} {str(param.dtype).removeprefix('torch.')}{where}"
            kinds[kind] = kinds.get(kind, 0) + 1
        what = ", ".join(f"{n} of {kind}" for kind, n in kinds.items())
        lines.append(f"chunk {number}: {chunk.nbytes} bytes, {what}")
    return "\n".join(lines)


def check_same_plan(group: Any, description: str) -> None:
    """RuntimeError with both plans, on every rank of `group`, unless all described the same. Collective: one small
    object a rank is gathered, and the descriptions only where they differ."""
    mine = hashlib.sha256(description.encode()).hexdigest()
    size = dist.get_world_size(group)
    digests: list[Any] = [None] * size
    with torch.inference_mode(False):
        dist.all_gather_object(digests, mine, group=group)
        if len(set(digests)) == 1:
            return
        plans: list[Any] = [None] * size
        dist.all_gather_object(plans, description, group=group)
    other = next(i for i, digest in enumerate(digests) if digest != digests[0])
    raise RuntimeError(
        "the ranks cut their Muon parameters at different places, and would wait for each other for ever; give every "
        "rank the same parameters in the same order and groups, and the same step_chunk_bytes\n"
        f"plan of rank 0 of the group:\n{plans[0]}\nplan of rank {other}:\n{plans[other]}"
    )
