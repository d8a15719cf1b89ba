"""A plan's device bytes, against live bytes of the optimizer's own Python on a fake CUDA world of many ranks."""

from __future__ import annotations

import gc

import pytest
import torch
from offload.test_fake_cuda import FakeCuda
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload import optimizer as offload_optimizer
from statestream.planner.estimate import estimate
from statestream.planner.formats import MOMENTS
from statestream.planner.mesh import Mesh
from statestream.planner.model import Model, Parameter
from statestream.planner.settings import Settings
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

RANK = 0
"""Of the fake world: the one whose shards are the largest."""

SHAPES = [(4000, 256), (64, 1000), (256,), (1000, 3, 40), (4096, 512)]
MODEL = Model("a test", tuple(Parameter(f"w{i}", shape, "bf16") for i, shape in enumerate(SHAPES)))

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = {
    "fp32 moments and masters": ({}, {"master_weights": True}),
    "bf16 moments, no masters": (
        {"moments": "bf16", "masters": "none"},
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
    "two formats": ({"moments": "bf16,fp32"}, {"master_weights": True, "exp_avg_dtype": "bf16"}),
    "remainders, to the host": (
        {"moments": "bf16", "masters": "remainders", "export": "host", "staging": "1MiB"},
        {
            "master_weights": True,
            "store_param_remainders": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
            "state_dict_cpu_offload": True,
            "export_staging_bytes": 1 << 20,
        },
    ),
    "fp32 moments, bf16 masters to the device": (
        {"moments": "bf16"},
        {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
    "fp16 moments and masters": (
        {"moments": "fp16", "masters": "fp16"},
        {
            "master_weights": True,
            "master_weight_dtype": "fp16",
            "exp_avg_dtype": "fp16",
            "exp_avg_sq_dtype": "fp16",
        },
    ),
    "fp8 moments, no masters": (
        {"moments": "fp8", "masters": "none"},
        {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    ),
    "fp8 and bf16 moments, remainders, to the host": (
        {"moments": "fp8,bf16", "masters": "remainders", "export": "host", "staging": "1MiB"},
        {
            "master_weights": True,
            "store_param_remainders": True,
            "exp_avg_dtype": "fp8",
            "exp_avg_sq_dtype": "bf16",
            "state_dict_cpu_offload": True,
            "export_staging_bytes": 1 << 20,
        },
    ),
    "fp32 moments, to the host": (
        {"masters": "none", "export": "host", "staging": "1MiB"},
        {"state_dict_cpu_offload": True, "export_staging_bytes": 1 << 20},
    ),
    "fp32 weights": ({"weights": "fp32", "grads": "fp32"}, {"master_weights": True}),
}
"""Settings of the plan, and the arguments that they stand for."""


@pytest.mark.parametrize(("elements", "scales"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)])
def test_a_block_that_is_begun_has_its_scale(elements, scales):
    assert MOMENTS["fp8"].nbytes(elements) == elements + 4 * scales
    assert MOMENTS["fp16"].nbytes(elements) == 2 * elements + 4 * scales
    assert MOMENTS["bf16"].nbytes(elements) == 2 * elements


@pytest.mark.parametrize(("masters", "each"), [("fp32", 28), ("none", 22), ("remainders", 26)])
def test_a_weight_is_read_where_no_fp32_master_stands_for_it(masters, each):
    """BF16 weights and gradients: moments and masters both ways, the gradient once, the weight as said."""
    shares = Mesh().shares(Model("a test", (Parameter("w", (1_000_000,), "bf16"),)))
    assert estimate(shares, Settings.checked(masters=masters)).traffic == each * 1_000_000


@pytest.mark.parametrize(("weights", "bytes_each"), [("fp8", 4), ("fp16", 2), ("fp32", 4)])
def test_gradients_are_as_the_weights_and_fp32_where_those_are_quantised(weights, bytes_each):
    shares = Mesh().shares(Model("a test", (Parameter("w", (512, 512), weights),)))
    assert estimate(shares, Settings.checked(masters="none")).device["grads"] == bytes_each * 512 * 512


@pytest.mark.parametrize(
    ("mesh", "shape", "local"),
    [
        (Mesh(shard=4), (8, 16, 1024), (2, 16, 1024)),  # experts enough
        (Mesh(shard=16), (8, 16, 1024), (8, 1, 1024)),  # their rows, where experts are fewer than the ranks
        (Mesh(shard=64), (8, 16, 1024), (1, 16, 1024)),  # and experts again, where rows are fewer too
        (Mesh(tensor=2), (8, 16, 1024), (8, 8, 1024)),
        (Mesh(tensor=2), (9, 15, 1024), (9, 15, 512)),
        (Mesh(tensor=2), (16, 1024), (8, 1024)),
    ],
    ids=str,
)
def test_what_a_rank_holds_of_stacked_matrices(mesh, shape, local):
    assert mesh.share(Parameter("experts", shape)).local == local


class Sharded(torch.nn.Module):
    """The parameters of MODEL on a mesh, as FSDP2 leaves them on one rank, each with a gradient."""

    def __init__(self, mesh, dtype: torch.dtype):
        super().__init__()
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        ranks = mesh.size(mesh.ndim - 1)
        for parameter in MODEL.parameters:
            rows = -(-parameter.shape[0] // ranks)
            local = torch.empty(rows, *parameter.shape[1:], dtype=dtype, device="cuda:0")
            whole = torch.Size(parameter.shape)
            sharded = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole, stride=torch.empty(whole, device="meta").stride()
            )
            self.register_parameter(parameter.name, torch.nn.Parameter(sharded))

    def make_grads(self) -> None:
        for param in self.parameters():
            param.grad = torch.empty_like(param)


def measured(mode: dict, shape: tuple[int, ...], dtype: torch.dtype, chunk: int | None = None) -> dict[str, int]:
    """Live device bytes by kind, and the extra bytes of a step, an export and a load."""
    names = ("replicate", "shard")[-len(shape) :]
    with fake_cuda_world(shape, names, rank=RANK) as mesh, torch.no_grad(), LiveBytes() as live:
        found = {}

        def since_mark(what: str) -> None:
            found[what] = live.kept
            live.mark()

        model = Sharded(mesh, dtype)
        since_mark("weights")
        model.make_grads()
        since_mark("grads")
        optimizer = FusedAdam(model.parameters(), **mode)
        if chunk is not None:
            optimizer = CPUOffloadOptimizer(optimizer, chunk)
        optimizer.step()  # makes the state
        gc.collect()
        since_mark("state")
        optimizer.step()
        found["step"] = live.extra
        gc.collect()
        live.mark()
        exported = get_optimizer_state_dict(model, optimizer)
        found["export"] = live.extra
        set_optimizer_state_dict(model, optimizer, exported)
        found["load"] = live.extra
        return found


def planned(options: dict, mesh: Mesh) -> dict[str, int]:
    made = estimate(mesh.shares(MODEL), Settings.checked(**options))
    state = sum(nbytes for kind, nbytes in made.device.items() if kind not in ("weights", "grads"))
    return {
        "weights": made.device["weights"],
        "grads": made.device["grads"],
        "state": state,
        "step": made.step.device,
        "export": made.export.device,
        "load": made.load.device,
    }


def assert_within_5_percent(plan: dict[str, int], found: dict[str, int]) -> None:
    off = {what: (plan[what], found[what]) for what in found if abs(plan[what] - found[what]) > 0.05 * found[what]}
    assert not off, f"planned and measured bytes differ by more than 5%: {off}"


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_every_kind_are_within_5_percent_of_live_bytes(mode):
    options, arguments = MODES[mode]
    found = measured(arguments, (64,), DTYPES[options.get("weights", "bf16")])
    assert found["state"] > found["weights"] > 0
    assert_within_5_percent(planned(options, Mesh(shard=64)), found)


def test_replicas_hold_what_their_shards_say():
    found = measured({"master_weights": True}, (4, 16), torch.bfloat16)
    assert_within_5_percent(planned({}, Mesh(replicate=4, shard=16)), found)


@pytest.mark.parametrize("moments", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("chunk", [1 << 18, 1 << 20, 1 << 30])
def test_a_streamed_step_takes_what_is_planned(chunk, moments, monkeypatch):
    monkeypatch.setattr(offload_optimizer, "device_for", lambda _: FakeCuda())
    arguments = {"master_weights": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    found = measured(arguments, (8,), torch.bfloat16, chunk)
    assert found["state"] == 0 < found["step"]
    assert_within_5_percent(planned({"moments": moments, "chunk": chunk}, Mesh(shard=8)), found)


@pytest.mark.parametrize(
    ("shape", "columns"), [((4096, 512), 0), ((512, 1001), 0), ((1001, 512), 1), ((128, 256, 512), 1), ((4099, 3), 0)]
)
def test_tensor_parallel_ranks_hold_their_part(shape, columns):
    """Against torch's own split, 4 parts of the dimension that tensor parallelism cuts, then 8 of the rows."""
    whole = torch.empty(shape, device="meta")
    part = whole.chunk(4, columns)[0].chunk(8, 0)[0]
    assert Mesh(shard=8, tensor=4).share(Parameter("w", shape)).elements == part.numel()


def test_stacked_experts_that_are_fewer_than_the_ranks_are_cut_within():
    """Cut by experts, each of 8 ranks would hold a whole one and 56 nothing."""
    assert Mesh(shard=64).share(Parameter("experts", (8, 4096, 1024))).elements == 8 * 64 * 1024
