"""The number of host threads is this optimizer's own: not OMP_NUM_THREADS, and torch's is left alone."""

from __future__ import annotations

import os

import pytest
from statestream.offload.host.threads import host_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("ranks", "threads"), [(None, 8), ("1", 8), ("2", 4), ("3", 2), ("8", 1), ("16", 1), ("0", 8), ("x", 8), ("", 8)]
)
def test_cores_are_shared_among_the_ranks_of_a_machine(ranks, threads, monkeypatch):
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_threads(None) == threads


def test_what_is_asked_for_is_used(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_threads(3) == 3
