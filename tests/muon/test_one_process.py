"""Muon streamed in one process: the optimizer's own bits, whatever the chunks."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from statestream import CPUOffloadOptimizer
from statestream.offload.muon.strategy import MuonStrategy

from .cases import CASES, Case, Group, Run, check_same, offloaded, train


@cache
def plain(name: str) -> Run:
    """A run of the optimizer itself; nothing writes to it any more."""
    return train(CASES[name].run())


@pytest.mark.parametrize("chunks", ["one", "several", "each unit"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_optimizer(name, chunks):
    case = CASES[name]
    each = offloaded(case.run(), 1).optimizer.strategy.store.plan
    # A chunk gets a third of the budget.
    budget = {"one": None, "several": sum(c.nbytes for c in each.chunks), "each unit": 1}[chunks]
    mine = offloaded(case.run(), budget)
    assert isinstance(mine.optimizer.strategy, MuonStrategy)
    plan = mine.optimizer.strategy.store.plan
    assert len(plan.chunks) == 1 if chunks == "one" else 1 < len(plan.chunks) <= len(each.chunks)
    check_same(train(mine), plain(name))


@pytest.mark.parametrize("layout", ["megabatched", "batched", "torch"])
def test_a_matrix_is_never_split_and_one_that_is_larger_than_the_budget_is_reported(layout):
    case = Case(layout, [Group([(64, 256), (8, 8), (64, 256)])])
    run = case.run()
    with pytest.warns(
        RuntimeWarning, match=r"2 (Muon batches|matrices) need more than step_chunk_bytes=70000 .* 131072"
    ):
        optimizer = CPUOffloadOptimizer(run.optimizer, 70_000)
    plan = optimizer.strategy.store.plan
    assert [len(chunk.pieces) for chunk in plan.chunks] == [1, 1, 1]
    assert plan.ring_bytes == 2 * 64 * 256 * 4  # momentum, and room for the parameter


@pytest.mark.parametrize("layout", ["megabatched", "batched"])
def test_every_groups_step_advances_by_one_without_a_single_gradient(layout):
    case = Case(layout, [Group([(8, 8)]), Group([(5,)], options={"algorithm": "adamw"})], missing=lambda step: {0, 1})
    plain, mine = train(case.run()), train(offloaded(case.run(), 1))
    assert [g["step"] for g in mine.optimizer.param_groups] == [4, 4]
    check_same(mine, plain)


def test_groups_keep_number_and_order_in_every_chunk(monkeypatch):
    case = CASES["megabatched, odd rows"]
    run = offloaded(case.run(), 1)
    inner, seen = run.optimizer.inner, []
    groups = list(inner.param_groups)
    call = run.optimizer.strategy.call

    def watched():
        assert [id(g) for g in inner.param_groups] == [id(g) for g in groups]
        seen.append(sum(len(g["params"]) for g in groups))
        call()

    monkeypatch.setattr(run.optimizer.strategy, "call", watched)
    train(run, range(1))
    assert sum(seen) == len(run.params) and len(seen) == len(run.optimizer.strategy.store.plan.chunks) > 10


def test_no_state_key_is_deleted_while_a_step_runs():
    case = CASES["megabatched, odd rows"]
    run = offloaded(case.run(), 1)
    inner = run.optimizer.inner
    keys = {p: list(inner.state[p]) for p in run.params}
    call = run.optimizer.strategy.call

    def watched():
        assert {p: list(inner.state[p]) for p in run.params} == keys
        call()

    run.optimizer.strategy.call = watched
    train(run, range(2))


def test_a_parameter_that_is_unfrozen_later_and_a_group_that_is_added_train_on():
    for layout in ("megabatched", "batched", "torch"):
        case = Case(layout, [Group([(16, 16)] * 3)])
        runs = [case.run(), case.run()]
        for run in runs:
            run.params[1].requires_grad_(False)
        runs[1] = offloaded(runs[1], 1)
        for run in runs:
            for step in range(2):
                case.set_grads(run.params, step)
                run.params[1].grad = None
                run.optimizer.step()
            run.params[1].requires_grad_(True)
            run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(16, 16))]})
            run.params.append(run.optimizer.param_groups[-1]["params"][0])
            for step in range(2):
                case.set_grads(run.params[:3], step)
                run.params[3].grad = torch.full((16, 16), 1.0 + step)
                run.optimizer.step()
        check_same(runs[1], runs[0])


def test_a_parameter_may_leave_and_the_others_train_on():
    for layout in ("megabatched", "batched", "torch"):
        case = Case(layout, [Group([(16, 16)] * 5)])
        runs = [case.run(), offloaded(case.run(), 1)]
        for run in runs:
            train(run, range(2))
            del run.optimizer.param_groups[0]["params"][1]
            run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(16, 16))]})
            run.optimizer.param_groups[1]["params"][0].grad = torch.ones(16, 16)
            train(run, range(2, 4))
        check_same(runs[1], runs[0])


def test_a_copy_trains_as_the_original():
    """dion's Muon cannot be copied by itself: torch copies groups and state alone, and it has more."""
    case = CASES["torch, DDP"]
    run = train(offloaded(case.run(), 1), range(2))
    with pytest.warns(RuntimeWarning, match="need more than step_chunk_bytes"):
        run.params, run.optimizer = copy.deepcopy((run.params, run.optimizer))
    check_same(train(run, range(2, 4)), train(case.run()))


@pytest.mark.parametrize("name", ["megabatched, odd rows", "batched", "torch, DDP"])
def test_state_that_someone_puts_in_is_taken_up(name):
    """As trainers do that move all they find in the state to the device."""
    runs = [train(CASES[name].run(), range(2)), train(offloaded(CASES[name].run(), 1), range(2))]
    for run in runs:
        for param in run.params:
            state = run.optimizer.state[param]
            state.update({key: value * 3 for key, value in state.items()})
    plain, mine = (train(run, range(2, 4)) for run in runs)
    check_same(mine, plain)
    blocks = {a.block.untyped_storage().data_ptr() for bank in mine.optimizer.strategy.store.banks for a in bank.arenas}
    for state in mine.optimizer.state.values():
        assert {value.untyped_storage().data_ptr() for value in state.values()} <= blocks


def test_state_that_the_optimizer_makes_for_an_added_group_goes_to_host_memory():
    run = offloaded(CASES["megabatched, odd rows"].run(), 1)
    added = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, 4))]
    run.optimizer.add_param_group({"params": added[:1], "algorithm": "adamw"})
    run.optimizer.add_param_group({"params": added[1:]})
    for param in added:
        location = run.optimizer.strategy.store.location(param)
        state = run.optimizer.state[param]
        for arena in location.bank.arenas:
            assert state[arena.kind].untyped_storage().data_ptr() == arena.block.untyped_storage().data_ptr()


def test_what_only_looks_like_muon_is_refused():
    class Muon(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="it is not known whether"):
        CPUOffloadOptimizer(Muon([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1, momentum=0.9), 1)
    run = Case("batched", [Group([(4, 4)], options={"algorithm": "shampoo"})]).run()
    with pytest.raises(ValueError, match="algorithm 'shampoo'"):
        CPUOffloadOptimizer(run.optimizer, 1)
