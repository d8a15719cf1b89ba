"""How many threads the host's share of a step uses."""

from __future__ import annotations

import os

__all__ = ["host_threads"]


def host_threads(cpu_threads: int | None) -> int:
    """`cpu_threads`; if None, the cores that this process may run on, divided among the ranks of this machine.

    Launchers set OMP_NUM_THREADS=1 for every rank, and torch takes that for its own operations: it says nothing about
    this. The ranks of a machine are counted by LOCAL_WORLD_SIZE, as torchrun sets it.
    """
    if cpu_threads is not None:
        return cpu_threads
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // int(ranks)) if ranks.isdecimal() and int(ranks) else cores
