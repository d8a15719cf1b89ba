"""Which parameters count as written since they were remembered, whoever was remembered with them and in what order."""

from __future__ import annotations

import random

import pytest
import torch
from statestream.written import WriteWatch
from torch.nn import Parameter


def in_memory(room: bytearray) -> torch.Tensor:
    return torch.frombuffer(room, dtype=torch.float32) if room else torch.zeros(0)


def where(params: list[Parameter], param: Parameter) -> int:
    return next(i for i, p in enumerate(params) if p is param)


def some_of(draw: random.Random, params: list[Parameter]) -> list[Parameter]:
    """The same ones mostly, as a step has them; else some, in some order."""
    if draw.random() < 0.5:
        return params
    return draw.sample(params, draw.randint(0, len(params)))


@torch.no_grad()
def history(seed: int, length: int = 60) -> None:
    """Checks one. What is written is known here by what was done, not by looks."""
    draw = random.Random(seed)
    rooms = [bytearray(draw.choice((0, 4, 20))) for _ in range(draw.randint(1, 6))]
    params = [Parameter(in_memory(room)) for room in rooms]
    watch, written = WriteWatch(), set(map(id, params))
    for _ in range(length):
        some = some_of(draw, params)
        match draw.choice(
            ("ask", "remember", "remember", "write", "exchange", "forget", "forget all", "ask, remember")
        ):
            case "remember":
                watch.remember(some, some)
                written -= set(map(id, some))
            case "write" if some:
                some[0].add_(1)
                written.add(id(some[0]))
            case "exchange" if some and some[0].numel():
                # As an allocator gives memory out again that was freed: mostly another storage at the same address.
                room = bytearray(some[0].nbytes) if draw.random() < 0.2 else rooms[where(params, some[0])]
                some[0].data = in_memory(room)
                written.add(id(some[0]))
            case "forget" if some:
                watch.forget(some[0])
                written.add(id(some[0]))
            case "forget all":
                watch.forget()
                written = set(map(id, params))
            case "ask, remember":
                watch.written(params, params)
                watch.remember(params, params)
                written = set()
        asked = some_of(draw, params)
        found = watch.written(asked, list(asked) if draw.random() < 0.5 else asked)
        assert [id(param) for param, _ in found] == [id(param) for param in asked if id(param) in written], seed


@pytest.mark.parametrize("seed", range(40))
def test_those_and_only_those_count_as_written(seed):
    history(seed)


@pytest.mark.long  # a minute
def test_those_and_only_those_count_as_written_in_many_histories():
    for seed in range(40, 20_000):
        history(seed)


def test_a_parameter_in_inference_mode_always_counts_as_written():
    with torch.inference_mode():
        counted_by_no_one = Parameter(torch.zeros(2), requires_grad=False)
    plain, watch = Parameter(torch.zeros(2)), WriteWatch()
    both = [plain, counted_by_no_one]
    watch.remember(both, both)
    assert [id(param) for param, _ in watch.written(both, both)] == [id(counted_by_no_one)]
