"""Each thing that would make a streamed Muon wrong, planted: the comparison or a check has to notice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.thread_ranks import run_on_threads
from statestream.offload.muon import agreement
from statestream.offload.muon import strategy as muon_module
from statestream.offload.muon.agreement import check_partition, joined
from statestream.offload.muon.strategy import MuonStrategy
from statestream.offload.muon.variants import TorchMuon, muon_layout
from statestream.offload.per_parameter import counts, subset
from statestream.streaming import pipeline
from statestream.streaming.plan import Unit, make_plan
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from .cases import ADAMW, CASES, EMPTY, EVEN, Case, Group, differences, offloaded, train


def streamed_differences(name: str) -> list[str]:
    case = CASES[name]
    return differences(train(offloaded(case.run(), 1)), train(case.run()))


def test_a_counter_that_advances_once_a_chunk_shows(monkeypatch):
    monkeypatch.setattr(counts.Counts, "set_back", lambda self: None)
    found = streamed_differences("batched")
    assert any(d.startswith("step of group") for d in found)
    assert any(d.startswith("parameter") for d in found), "bias correction took the wrong count for the right one"


def packed_twice(self, members):
    """Every packed weight in the run of each of its batches, as if batches were stepped one by one."""
    of = {id(m.param): m for m in members}
    runs = []
    for group in self.inner.param_groups:
        params = [p for p in group["params"] if id(p) in of]
        runs += [[of[id(params[i])] for i in dict.fromkeys(b)] for b in self.layout.batches(group, params)]
    return runs


def test_a_packed_parameter_in_two_units_is_refused(monkeypatch):
    monkeypatch.setattr(MuonStrategy, "_together", packed_twice)
    with pytest.raises(RuntimeError, match=r"would update parameter 0 of group 0 \d times"):
        offloaded(CASES["batched, packed over several batches"].run(), 1)


def test_a_packed_parameter_is_not_stepped_twice_even_by_a_plan_that_says_so(monkeypatch):
    monkeypatch.setattr(muon_module, "check_partition", lambda *args: None)
    run = offloaded(CASES["batched, packed over several batches"].run(), 1)
    whole = run.optimizer.strategy._stream

    def twice(jobs, chosen):
        whole(jobs, chosen)
        whole(jobs, chosen)

    run.optimizer.strategy._stream = twice
    with pytest.raises(RuntimeError, match="about to be updated twice in one step"):
        train(run, range(1))


def test_a_parameter_left_out_of_a_step_is_an_error():
    run = offloaded(CASES["batched"].run(), 1)
    whole = run.optimizer.strategy._stream
    run.optimizer.strategy._stream = lambda jobs, chosen: whole(dict(list(jobs.items())[1:]), chosen)
    with pytest.raises(RuntimeError, match=r"\d+ parameters of \d+ with a gradient were updated"):
        train(run, range(1))


def test_an_empty_group_that_is_dropped_in_a_chunk_shows(monkeypatch):
    update = subset.Subset.update

    def dropping(self, params):
        chosen, inner = {id(p) for p in params}, self.inner
        whole = inner.param_groups
        inner.param_groups = [g for g in whole if any(id(p) in chosen for p in g["params"])]
        try:
            update(self, params)
        finally:
            inner.param_groups = whole

    monkeypatch.setattr(subset.Subset, "update", dropping)
    assert streamed_differences("megabatched, odd rows")


def test_momentum_that_is_not_stored_shows(monkeypatch):
    monkeypatch.setattr(pipeline._Flow, "_copy_out", lambda self, queue, stage: None)
    assert any("momentum" in d for d in streamed_differences("batched"))


@pytest.mark.parametrize(
    ("batches", "count", "runs"),
    [
        ([], 3, [[0], [1], [2]]),
        ([[0, 2], [1]], 3, [[0, 2], [1]]),
        ([[0, 1], [1, 2], [4]], 5, [[0, 1, 2], [3], [4]]),  # through a packed parameter
        ([[3, 1], [2, 0], [0, 3]], 4, [[0, 1, 2, 3]]),
    ],
)
def test_parameters_that_share_a_batch_are_one_run(batches, count, runs):
    assert joined(batches, count) == runs


def test_packed_weights_of_two_ranks_are_joined_through_their_matrices():
    """World size 2, blocks of 64, 32 and 32 rows: the blocks of 32 fill a batch by themselves."""
    run = Case("batched", [Group([(128, 16)] * 5, options={"partitions": (64, 32, 32)}), Group(EVEN), ADAMW]).run()
    inner = run.optimizer
    group = inner.param_groups[0]
    assert joined(TorchMuon(inner).batches(group, group["params"]), 5) == [[i] for i in range(5)]
    inner._world_size = 2
    batches = muon_layout(inner).batches(group, group["params"])
    assert sorted(map(len, batches)) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert joined(batches, 5) == [[0, 1], [2, 3], [4]]


def test_a_plan_that_leaves_a_unit_out_or_repeats_one_is_no_partition():
    plan = make_plan([Unit((256,)), Unit((256,), joined=True), Unit((512,))], 1)
    names = {1: "a", 2: "b", 3: "b"}  # two parameters may have one name
    check_partition(plan, [1, 2, 3], names)
    with pytest.raises(RuntimeError, match="update d 0 times"):
        check_partition(plan, [1, 2, 3], {**names, 4: "d"})
    with pytest.raises(RuntimeError, match="update b 2 times"):
        check_partition(plan, [1, 2, 2], {1: "a", 2: "b"})
    check_partition(plan, [1, 2, 3], {1: "a", 3: "c"})  # the second has left the optimizer


def test_a_plan_is_described_by_what_all_ranks_know():
    case = Case("megabatched", [Group([(64, 256)] * 2, options={}), EMPTY, ADAMW], dtype=torch.bfloat16)
    units = offloaded(case.run(), 1).optimizer.strategy
    params = [p for bank in units.store.banks for p in bank.units]
    lines = agreement.describe(units.store.plan, params).splitlines()
    assert lines[0] == "chunk 0: 65536 bytes, 1 of 64x256 bfloat16"
    assert len(lines) == 5


def test_plans_of_other_placements_differ():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plan = make_plan([Unit((1024,))], None)
        described = [
            agreement.describe(plan, [distribute_tensor(torch.zeros(16, 16), mesh, [placement])])
            for placement in (Shard(0), Shard(1), Replicate())
        ]
        assert len(set(described)) == 3
    finally:
        dist.destroy_process_group()


def test_ranks_whose_plans_differ_all_raise_both_plans_and_equal_ones_go_on(monkeypatch):
    def agree(rank):
        return agreement.check_same_plan((0, 1, 2), "chunk 0: 512 bytes" if rank == 2 else plans[0])

    plans = ["chunk 0: 256 bytes", "chunk 0: 512 bytes"]  # of one length
    for error in run_on_threads(monkeypatch, 3, agree):
        assert isinstance(error, RuntimeError)
        assert str(error).endswith(f"plan of rank 0 of the group:\n{plans[0]}\nplan of rank 2:\n{plans[1]}")
    plans = plans[1:]
    assert run_on_threads(monkeypatch, 3, agree) == [None] * 3
