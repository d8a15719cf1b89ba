"""Ranks as threads of this process: each runs the same work, and collectives bring them together."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ThreadMesh", "run_on_threads"]

Group = tuple[int, ...]
"""The ranks in it."""


class ThreadMesh:
    """What code asks of a DeviceMesh of these ranks, numbered row by row."""

    device_type = "cpu"

    def __init__(self, shape: Sequence[int], rank: int):
        self.shape, self.ndim = tuple(shape), len(shape)
        self._all = list(itertools.product(*map(range, shape)))
        self._coordinate = self._all[rank]

    def get_coordinate(self) -> list[int]:
        return list(self._coordinate)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def get_group(self, dim: int) -> Group:
        mine = self._coordinate
        return tuple(
            rank
            for rank, other in enumerate(self._all)
            if all(a == b for d, (a, b) in enumerate(zip(mine, other, strict=True)) if d != dim)
        )


class _Meetings:
    """Values that the ranks of a group have brought to its n-th collective."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._brought: dict[tuple[Hashable, int], dict[int, Any]] = defaultdict(dict)
        self._count: dict[tuple[int, Hashable], int] = defaultdict(int)

    def meet(self, rank: int, group: Group, value: Any) -> list[Any]:
        with self._changed:
            number = self._count[rank, group]
            self._count[rank, group] += 1
            brought = self._brought[group, number]
            brought[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(brought) == len(group), timeout=20):
                raise TimeoutError(f"of ranks {group} only {sorted(brought)} came to collective {number}")
            return [brought[other] for other in group]


def run_on_threads(monkeypatch: Any, count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns, or the error that it raises, on each of `count` ranks. A group is the ranks in it, and
    None all of them."""
    meetings, here = _Meetings(), threading.local()
    everyone = tuple(range(count))

    def all_reduce(values: torch.Tensor, op: Any, group: Group | None = None) -> None:
        found = torch.stack(meetings.meet(here.rank, group or everyone, values.clone()))
        values.copy_({dist.ReduceOp.SUM: found.sum(0), dist.ReduceOp.MAX: found.amax(0)}[op])

    def all_gather_object(into: list[Any], value: Any, group: Group | None = None) -> None:
        into[:] = meetings.meet(here.rank, group or everyone, value)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(group or everyone))

    def on(rank: int) -> Any:
        here.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(on, everyone))
