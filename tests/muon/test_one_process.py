"""Muon streamed in one process: the optimizer's own bits, whatever the chunks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload.muon import MuonBatches

from .cases import CASES, Case, Group, differences, offloaded, train

BUDGETS = [None, 1, 300_000]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_optimizer(name, budget):
    case = CASES[name]
    plain, mine = train(case.run()), train(offloaded(case.run(), budget))
    assert isinstance(mine.optimizer.units, MuonBatches)
    chunks = len(mine.optimizer.units.store.plan.chunks)
    assert chunks == 1 if budget is None else chunks > 1 or budget > 1
    assert differences(mine, plain) == []


@pytest.mark.parametrize("layout", ["megabatched", "batched", "torch"])
def test_a_matrix_is_never_split_and_one_that_is_larger_than_the_budget_is_reported(layout):
    case = Case(layout, [Group([(64, 256), (8, 8), (64, 256)])])
    run = case.run()
    with pytest.warns(
        RuntimeWarning, match=r"2 (Muon batches|matrices) need more than step_chunk_bytes=70000 .* 131072"
    ):
        optimizer = CPUOffloadOptimizer(run.optimizer, 70_000)
    plan = optimizer.units.store.plan
    assert [len(chunk.pieces) for chunk in plan.chunks] == [1, 1, 1]
    assert plan.ring_bytes == 2 * 64 * 256 * 4  # momentum, and room for the parameter


@pytest.mark.parametrize("layout", ["megabatched", "batched"])
def test_every_groups_step_advances_by_one_without_a_single_gradient(layout):
    case = Case(layout, [Group([(8, 8)]), Group([(5,)], options={"algorithm": "adamw"})], missing=lambda step: {0, 1})
    plain, mine = train(case.run()), train(offloaded(case.run(), 1))
    assert [g["step"] for g in mine.optimizer.param_groups] == [4, 4]
    assert differences(mine, plain) == []


def test_groups_keep_number_and_order_in_every_chunk(monkeypatch):
    case = CASES["megabatched, odd rows"]
    run = offloaded(case.run(), 1)
    inner, seen = run.optimizer.inner, []
    groups = list(inner.param_groups)
    call = run.optimizer.units.call

    def watched():
        assert [id(g) for g in inner.param_groups] == [id(g) for g in groups]
        seen.append(sum(len(g["params"]) for g in groups))
        call()

    monkeypatch.setattr(run.optimizer.units, "call", watched)
    train(run, range(1))
    assert sum(seen) == len(run.params) and len(seen) == len(run.optimizer.units.store.plan.chunks) > 10


def test_no_state_key_is_deleted_while_a_step_runs():
    case = CASES["megabatched, odd rows"]
    run = offloaded(case.run(), 1)
    inner = run.optimizer.inner
    keys = {p: list(inner.state[p]) for p in run.params}
    call = run.optimizer.units.call

    def watched():
        assert {p: list(inner.state[p]) for p in run.params} == keys
        call()

    run.optimizer.units.call = watched
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
        assert differences(runs[1], runs[0]) == []


def test_a_copy_trains_as_the_original():
    """dion's Muon cannot be copied by itself: torch copies groups and state alone, and it has more."""
    case = CASES["torch"]
    run = train(offloaded(case.run(), 1), range(2))
    params, optimizer = copy.deepcopy((run.params, run.optimizer))
    run.params, run.optimizer = params, optimizer
    assert differences(train(run, range(2, 4)), train(case.run())) == []


def test_matrices_by_muon_and_the_rest_by_fused_adam():
    """The recipe of docs/muon.md."""

    def build(offload):
        generator = torch.Generator().manual_seed(3)
        matrices = [torch.nn.Parameter(torch.randn(32, 48, generator=generator)) for _ in range(4)]
        rest = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (32, 1000, 7)]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), FusedAdam(rest, lr=1e-3, master_weights=False)]
        if offload:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizers = [CPUOffloadOptimizer(o, 20_000) for o in optimizers]
        return matrices + rest, optimizers

    runs = [build(False), build(True)]
    for params, optimizers in runs:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(p, q)


def test_what_only_looks_like_muon_is_refused():
    class Muon(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="it is not known whether"):
        CPUOffloadOptimizer(Muon([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1, momentum=0.9), 1)
    run = Case("batched", [Group([(4, 4)], options={"algorithm": "shampoo"})]).run()
    with pytest.raises(ValueError, match="algorithm 'shampoo'"):
        CPUOffloadOptimizer(run.optimizer, 1)
