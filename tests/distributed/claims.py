"""Claims about DTensors under FusedAdam that four ranks check together."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from statestream import FusedAdam
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from .conversions import remainders_that_ranks_saved_become_the_masters_of_their_weights
from .layouts import LAYOUTS, plain, share
from .processes import Claim
from .runs import MODES, WITH_SCALES, check_against_uninterrupted, feed, load, optimizer_of, start, train
from .small_states import a_run_of_small_states_resumes_bit_equal_on_as_many_ranks

__all__ = ["CLAIMS", "ON_TWO"]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODE = "bf16 + masters"


# ---- the two exports ----


def both_exports_are_the_same(layout: str, mode: str, folder: Path) -> None:
    """state_dict_cpu_offload changes where tensors are, and nothing that a checkpoint sees."""
    model, optimizer = start(layout, mode)
    train(model, optimizer, 0, 2)
    exports, metadata = [], []
    for offload in (True, False):
        optimizer.state_dict_cpu_offload = offload
        exports.append(get_optimizer_state_dict(model, optimizer, options=FLAT))
        where = folder / f"{layout}-{mode}-{offload}".replace(" ", "_")
        dcp.save({"optim": exports[-1]}, checkpoint_id=where)
        metadata.append(dcp.FileSystemReader(where).read_metadata())
    on, off = exports
    assert list(on) == list(off)
    assert metadata[0].state_dict_metadata == metadata[1].state_dict_metadata
    for key, a in on.items():
        b = off[key]
        assert type(a) is type(b), key
        if isinstance(a, DTensor):
            assert (a.shape, a.stride(), a.dtype, a.placements) == (b.shape, b.stride(), b.dtype, b.placements), key
            assert a.device_mesh == b.device_mesh and a.device.type == "cpu", key
            a, b = a.to_local(), b.to_local()
            assert a.stride() == b.stride(), key
        if isinstance(a, torch.Tensor):
            assert a.dtype is b.dtype and torch.equal(a, b), key
        else:
            assert a == b, key


def the_usual_export_passes_fp32_state_on_by_reference_and_the_other_copies_it(folder: Path) -> None:
    model, optimizer = start("fsdp", "fp32", state_dict_cpu_offload=False)
    train(model, optimizer, 0, 1)
    live = {
        id(p): {k: v.to_local().data_ptr() for k, v in optimizer.state[p].items() if k != "step"}
        for p in model.parameters()
    }
    for offload in (False, True):
        optimizer.state_dict_cpu_offload = offload
        exported = optimizer.state_dict()["state"]
        members = [p for group in optimizer.param_groups for p in group["params"]]
        for i, param in enumerate(members):
            for key, address in live[id(param)].items():
                local = exported[i][key].to_local()
                assert local.numel() == 0 or (local.data_ptr() == address) == (not offload), key


# ---- an asynchronous save with a slow writer ----


class SlowWriter(FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if not self.may_write.wait(50):
            raise TimeoutError("nobody let the writer write")
        return super().write_data(*args, **kwargs)


class NoCopy(AsyncStager):
    """Trusts the state dict to be a snapshot already, which saves the copy that torch's stagers make."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def _saved_while_training(mode: str, stager: AsyncStager | None, offload: bool, folder: Path) -> None:
    """Steps three times between the save and the writing, then checks what was written."""
    model, optimizer = start("fsdp", mode)
    train(model, optimizer, 0, 3)
    optimizer.state_dict_cpu_offload = offload
    weights = {name: param.detach().clone() for name, param in model.state_dict().items()}
    state = {"model": weights, "optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    writer = SlowWriter(folder)
    future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    train(model, optimizer, 3, 3)
    writer.may_write.set()
    future.result()
    resumed, fresh = start("fsdp", mode, seed=1)
    load("flat", resumed, fresh, folder)
    check_against_uninterrupted(resumed, fresh, mode, 3)
    check_against_uninterrupted(model, optimizer, mode, 6)


def the_file_of_a_slow_writer_holds_the_values_of_the_save(mode: str, no_copy: bool, folder: Path) -> None:
    where = folder / f"slow-{mode}-{no_copy}".replace(" ", "_")
    _saved_while_training(mode, NoCopy() if no_copy else None, True, where)


def without_a_snapshot_it_would_hold_later_values(folder: Path) -> None:
    # The control: FP32 state of the usual export is the live state.
    try:
        _saved_while_training("fp32", NoCopy(), False, folder / "slow-control")
    except AssertionError:
        return
    raise AssertionError("the usual export of FP32 state was taken for a snapshot")


# ---- gradients that are not alike on all ranks ----


def a_gradient_on_some_ranks_alone_drops_no_key_and_hangs_nothing(folder: Path) -> None:
    """An expert that no token was sent to has no gradient where it lives."""
    model, optimizer = start("experts", MODE)
    feed(model, 0)
    if dist.get_rank() % 2:
        model.experts.grad = None
    optimizer.step()
    exported = get_optimizer_state_dict(model, optimizer, options=FLAT)
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, sorted(exported))
    assert all(each == keys[0] for each in keys)
    assert {"state.experts.step", "state.experts.exp_avg", "state.experts.master_param"} <= set(keys[0])
    assert exported["state.experts.step"].item() == 1 - dist.get_rank() % 2
    where = folder / "asymmetric"
    dcp.save({"optim": exported}, checkpoint_id=where)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert full["state"]["experts"]["exp_avg"].shape == (4, 6, 8)
    moment = exported["state.experts.exp_avg"].to_local().clone()
    assert bool(moment.any()) != bool(dist.get_rank() % 2)
    _, fresh = resumed = start("experts", MODE, seed=1)
    state = get_optimizer_state_dict(*resumed, options=FLAT)
    dcp.load({"optim": state}, checkpoint_id=where)
    set_optimizer_state_dict(*resumed, state, options=FLAT)
    assert torch.equal(fresh.state[resumed[0].experts]["exp_avg"].to_local().float(), moment)


def a_partial_gradient_is_summed_first(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(12.0).reshape(4, 3)
    for placement in (Replicate(), Shard(0), Shard(1)):
        param = nn.Parameter(distribute_tensor(full, mesh, [placement], src_data_rank=None))
        part = torch.full((4, 3), 1.0 + dist.get_rank())
        param.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        judge = nn.Parameter(full.clone())
        judge.grad = torch.full((4, 3), 10.0)  # 1 + 2 + 3 + 4
        for each in (param, judge):
            FusedAdam([each], lr=0.1).step()
        assert torch.equal(param.to_local(), share(judge.detach(), param))


def an_infinite_gradient_on_one_rank_skips_the_step_on_all(folder: Path) -> None:
    model, optimizer = start("fsdp", "fp32")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = {name: param.detach().to_local().clone() for name, param in model.named_parameters()}
    feed(model, 0)
    scaler.scale(torch.zeros(()))
    if dist.get_rank() == 1:
        model.up.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name]), name
        assert optimizer.state[param]["step"].item() == 0
    scaler.update()
    for count, unscales in enumerate((False, True), start=1):
        optimizer._step_supports_amp_scaling = unscales
        feed(model, 0)
        scaled = [param.grad.to_local().clone() for param in model.parameters()]
        scaler.step(optimizer)
        assert all(optimizer.state[param]["step"].item() == count for param in model.parameters())
        for param, grad in zip(model.parameters(), scaled, strict=True):
            assert torch.equal(param.grad.to_local(), grad / scaler.get_scale()), "left unscaled"
        scaler.update()


def counters_agree_where_a_group_is_empty_on_one_rank(folder: Path) -> None:
    param = nn.Parameter(torch.ones(4))
    here = [param] if dist.get_rank() == 0 else []
    optimizer = FusedAdam([{"params": [nn.Parameter(torch.ones(3))]}, {"params": here}])
    for _ in range(5):
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        optimizer.step()
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [5, 5]
    optimizer.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]


# ---- no communication, and no surprise for a fresh optimizer ----


def step_export_and_load_need_no_communication(layout: str, folder: Path) -> None:
    model, optimizer = start(layout, MODE)
    feed(model, 0)
    with CommDebugMode() as counted:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state_dict_cpu_offload = False
        optimizer.load_state_dict(optimizer.state_dict())
    assert counted.get_total_counts() == 0, counted.get_comm_counts()


def a_full_state_dict_in_memory_loads_without_communication(layout: str, folder: Path) -> None:
    judge = plain(MODES[MODE][0])
    judging = optimizer_of(judge, MODE)
    train(judge, judging, 0, 3)
    model, optimizer = start(layout, MODE)
    with torch.no_grad():
        whole = dict(judge.named_parameters())
        for name, param in model.named_parameters():
            param.to_local().copy_(share(whole[name].detach(), param))
    with CommDebugMode() as counted:
        optimizer.load_state_dict(judging.state_dict())
    assert counted.get_total_counts() == 0, counted.get_comm_counts()
    check_against_uninterrupted(model, optimizer, MODE, 3)
    train(model, optimizer, 3, 2)
    check_against_uninterrupted(model, optimizer, MODE, 5)


def a_get_of_a_fresh_optimizer_is_complete_and_changes_nothing(folder: Path) -> None:
    model, optimizer = start("fsdp", MODE)
    exported = get_optimizer_state_dict(model, optimizer, options=FLAT)
    for name, param in model.named_parameters():
        assert {f"state.{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq", "master_param")} <= set(exported)
        assert optimizer.state[param]["step"].item() == 0
        assert not exported[f"state.{name}.exp_avg"].to_local().any()
        assert param.grad is None
    check_against_uninterrupted(model, optimizer, MODE, 0)


def a_flat_set_into_a_fresh_optimizer_with_live_gradients_drops_nothing(folder: Path) -> None:
    model, optimizer = start("fsdp", MODE)
    train(model, optimizer, 0, 3)
    exported = get_optimizer_state_dict(model, optimizer, options=FLAT)
    fresh = optimizer_of(model, MODE)
    feed(model, 9)
    set_optimizer_state_dict(model, fresh, exported, options=FLAT)
    check_against_uninterrupted(model, fresh, MODE, 3)


# ---- checkpoints of other optimizers, and what the documentation says ----


def a_checkpoint_of_torchs_adamw_goes_on_here(mode: str, folder: Path) -> None:
    model, optimizer = start("fsdp", mode)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        feed(model, step)
        theirs.step()
    where = folder / f"adamw-{mode}".replace(" ", "_")
    dcp.save({"optim": get_optimizer_state_dict(model, theirs, options=FLAT)}, checkpoint_id=where)
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    absent = [key for key in state if key.endswith(".master_param")]
    _load_but(absent, state, where)
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    for name, param in model.named_parameters():
        ours, expected = optimizer.state[param], theirs.state[param]
        assert ours["step"].item() == 3, name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours[key].to_local(), expected[key].to_local().to(ours[key].dtype)), (name, key)
        if "master_param" in ours:
            assert torch.equal(ours["master_param"].to_local(), param.detach().to_local().float()), name
    assert all(group["lr"] == 1e-2 and group["weight_decay"] == 0.01 for group in optimizer.param_groups)


def a_checkpoint_without_counts_of_parameters_is_read_from_the_groups(folder: Path) -> None:
    """As Transformer Engine's optimizer writes them."""
    model, optimizer = start("fsdp", MODE)
    train(model, optimizer, 0, 3)
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    counts = [key for key in state if key.startswith("state.") and key.endswith(".step")]
    assert len(counts) == len(list(model.parameters()))
    where = folder / "te"
    dcp.save({"optim": {key: value for key, value in state.items() if key not in counts}}, checkpoint_id=where)
    fresh = optimizer_of(model, MODE)
    state = get_optimizer_state_dict(model, fresh, options=FLAT)
    _load_but(counts, state, where)
    set_optimizer_state_dict(model, fresh, state, options=FLAT)
    check_against_uninterrupted(model, fresh, MODE, 3)


def _load_but(absent: list[str], state: dict[str, Any], where: Path) -> None:
    """Loads what the checkpoint has; `absent` keys become None, which torch 2.9 needs in the place of nothing."""
    loaded = {key: value for key, value in state.items() if key not in absent}
    dcp.load({"optim": loaded}, checkpoint_id=where, planner=DefaultLoadPlanner(allow_partial_load=True))
    state.update(loaded | dict.fromkeys(absent))


def the_code_of_the_documentation_runs(folder: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    before = os.getcwd()
    where = folder / "documentation"
    where.mkdir(exist_ok=True)
    os.chdir(where)
    try:
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)
    finally:
        os.chdir(before)
    assert (where / "full.pt").exists()


# ---- tied weights, and a run that computes its gradients ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def _learner(seed: int) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FusedAdam(
        model.parameters(), lr=1e-2, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", state_dict_cpu_offload=True
    )


def _learn(model: nn.Module, optimizer: FusedAdam, first: int, end: int) -> list[float]:
    """Trains on batches of 16 that are cut over the ranks; the mean loss before each step."""
    ranks, losses = dist.get_world_size(), []
    for step in range(first, end):
        tokens = torch.randint(12, (16, 2), generator=torch.Generator().manual_seed(step)).chunk(ranks)[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def a_trained_model_with_tied_weights_resumes_with_equal_losses(folder: Path) -> None:
    """Saved on four; the losses of the run that goes on are left for whoever resumes it on other ranks."""
    model, optimizer = _learner(0)
    _learn(model, optimizer, 0, 4)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    assert "state.embedding.weight.exp_avg" in state["optim"] and len(list(model.parameters())) == 3
    dcp.save(state, checkpoint_id=folder / "tied")
    losses = _learn(model, optimizer, 4, 8)
    assert _resumed_losses(folder) == losses
    assert losses[-1] < losses[0]
    if dist.get_rank() == 0:
        torch.save(losses, folder / "tied.losses")


def it_resumes_on_other_ranks_with_close_losses(folder: Path) -> None:
    there = torch.load(folder / "tied.losses", weights_only=True)
    torch.testing.assert_close(_resumed_losses(folder), there, rtol=1e-4, atol=1e-5)


def _resumed_losses(folder: Path) -> list[float]:
    model, optimizer = _learner(1)
    load("flat", model, optimizer, folder / "tied")
    return _learn(model, optimizer, 4, 8)


def _named(claim: Callable[..., None], *args: Any) -> tuple[str, Claim]:
    words = [claim.__name__.replace("_", " "), *map(str, args)]
    return ", ".join(words), partial(claim, *args) if args else claim


CLAIMS: dict[str, Claim] = dict(
    [
        *(_named(both_exports_are_the_same, layout, MODE) for layout in ("fsdp", "tp_fsdp", "experts", "left_out")),
        *(_named(both_exports_are_the_same, "fsdp", mode) for mode in MODES if mode != MODE),
        _named(the_usual_export_passes_fp32_state_on_by_reference_and_the_other_copies_it),
        _named(the_file_of_a_slow_writer_holds_the_values_of_the_save, MODE, True),
        _named(the_file_of_a_slow_writer_holds_the_values_of_the_save, MODE, False),
        _named(without_a_snapshot_it_would_hold_later_values),
        _named(a_gradient_on_some_ranks_alone_drops_no_key_and_hangs_nothing),
        _named(a_partial_gradient_is_summed_first),
        _named(an_infinite_gradient_on_one_rank_skips_the_step_on_all),
        _named(counters_agree_where_a_group_is_empty_on_one_rank),
        *(_named(step_export_and_load_need_no_communication, layout) for layout in ("hsdp", "tp_fsdp", "left_out")),
        *(
            _named(a_full_state_dict_in_memory_loads_without_communication, layout)
            for layout in ("columns", "tp_fsdp", "experts")
        ),
        _named(a_get_of_a_fresh_optimizer_is_complete_and_changes_nothing),
        _named(a_flat_set_into_a_fresh_optimizer_with_live_gradients_drops_nothing),
        _named(a_checkpoint_of_torchs_adamw_goes_on_here, MODE),
        _named(a_checkpoint_without_counts_of_parameters_is_read_from_the_groups),
        _named(remainders_that_ranks_saved_become_the_masters_of_their_weights, "tp_fsdp", "fsdp"),
        *(
            _named(a_run_of_small_states_resumes_bit_equal_on_as_many_ranks, layout, mode)
            for layout, mode in zip(("fsdp", "tp_fsdp"), WITH_SCALES, strict=True)
        ),
        _named(the_code_of_the_documentation_runs),
        _named(a_trained_model_with_tied_weights_resumes_with_equal_losses),
    ]
)

OTHERS: dict[str, Claim] = dict(
    [
        *(_named(both_exports_are_the_same, layout, MODE) for layout in LAYOUTS),
        *(_named(the_file_of_a_slow_writer_holds_the_values_of_the_save, mode, True) for mode in MODES),
        *(_named(step_export_and_load_need_no_communication, layout) for layout in LAYOUTS),
        *(_named(a_full_state_dict_in_memory_loads_without_communication, layout) for layout in LAYOUTS),
        _named(a_checkpoint_of_torchs_adamw_goes_on_here, "fp32"),
        _named(remainders_that_ranks_saved_become_the_masters_of_their_weights, "fsdp", "columns"),
        *(
            _named(a_run_of_small_states_resumes_bit_equal_on_as_many_ranks, layout, mode)
            for layout in ("fsdp", "columns", "tp_fsdp", "left_out")
            for mode in WITH_SCALES
        ),
    ]
)
"""Every layout and mode, as a long test."""

ON_TWO: dict[str, Claim] = dict([_named(it_resumes_on_other_ranks_with_close_losses)])
