"""Which parameters count as written since they were remembered, whoever was remembered with them and in what order."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from collections.abc import Iterable

import pytest
import torch
from statestream import FusedAdam
from statestream.tensors.write_tracker import WriteTracker
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
    watch, written = WriteTracker(), set(map(id, params))
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
    plain, watch = Parameter(torch.zeros(2)), WriteTracker()
    both = [plain, counted_by_no_one]
    watch.remember(both, both)
    assert [id(param) for param, _ in watch.written(both, both)] == [id(counted_by_no_one)]


def bytes_remembered(params: list[Parameter], sets: Iterable[list[Parameter]]) -> int:
    """What a watch keeps that saw these sets, one after another."""
    gc.collect()
    tracemalloc.start()
    watch = WriteTracker()
    for some in sets:
        watch.remember(some, some)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert watch.written(params, params) == []
    return kept


def test_what_is_kept_does_not_grow_with_the_sets_that_parameters_were_stepped_in():
    params = [Parameter(torch.zeros(1)) for _ in range(300)]
    draw = random.Random(0)
    common, rare = params[:200], params[200:]
    one_by_one = bytes_remembered(params, ([param] for param in params))
    for sets in (
        (params[i:] for i in range(300)),
        [params, *(draw.sample(params, 150) for _ in range(100))],
        ([*common, param] for param in rare),
    ):
        assert bytes_remembered(params, sets) < 1.2 * one_by_one


@pytest.mark.parametrize("arguments", [{"master_weights": True}, {"exp_avg_dtype": "fp8"}], ids=str)
def test_parameters_that_were_replaced_with_their_state_are_freed_by_the_next_step(arguments):
    """As trainers do that grow and prune a model."""
    optimizer = FusedAdam([Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(3)], **arguments)
    group = optimizer.param_groups[0]
    for _ in range(3):
        for param in group["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        replaced = [weakref.ref(param) for param in group["params"]]
        for place in range(3):
            del optimizer.state[group["params"][place]]
            group["params"][place] = param = Parameter(torch.ones(4, dtype=torch.bfloat16))
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert [param() for param in replaced] == [None] * 3


def test_a_parameter_that_was_replaced_is_freed_by_the_next_export():
    params = [Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = FusedAdam(params, master_weights=True)
    for round in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        replaced = weakref.ref(params[round])
        params[round] = optimizer.param_groups[0]["params"][round] = Parameter(torch.zeros(4, dtype=torch.bfloat16))
        param = None
        optimizer.state_dict()
        assert replaced() is None


def test_a_parameter_whose_local_tensor_is_written_by_itself_counts_as_written():
    """A DTensor's versions are not those of its local tensor."""
    params, locals_ = [Parameter(torch.zeros(3)) for _ in range(2)], [torch.zeros(3) for _ in range(2)]
    watch = WriteTracker()
    watch.remember(params, locals_)
    assert watch.written(params, locals_) == []
    locals_[1].add_(1)
    ((param, local),) = watch.written(params, locals_)
    assert param is params[1] and local is locals_[1]
