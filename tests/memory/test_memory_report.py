"""`memory_report()`: what is held, against sizes by hand; what a step and an export took, against live bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.modes import FORMS
from offload.makers import SignDescent
from offload.test_fake_cuda import FakeCuda, sharded
from statestream import CPUOffloadOptimizer, FusedAdam, log_memory
from statestream.memory import MemoryReport
from statestream.offload import optimizer as offload_optimizer

from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.int16: 2, torch.float16: 2, torch.uint8: 1}
SHAPES = [(100, 30), (7,), (64, 64)]
ELEMENTS = 100 * 30 + 7 + 64 * 64
MiB = 1 << 20


def with_grads(dtypes=(torch.float32,), shapes=SHAPES) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)])) for i, shape in enumerate(shapes)]
    for param in params:
        param.grad = torch.zeros_like(param)
    return params


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_kind_has_its_bytes(form):
    params = with_grads(form.param_dtypes)
    optimizer = FusedAdam(params, **form.arguments)
    optimizer.step()
    expected = {"weights": 0, "grads": 0, "step": 4 * len(params)}
    for param in params:
        expected["weights"] += param.numel() * SIZES[param.dtype]
        expected["grads"] += param.numel() * SIZES[param.dtype]
        for name, dtype in form.stored(param).items():
            expected[name] = expected.get(name, 0) + param.numel() * SIZES[dtype]
            if dtype in (torch.float16, torch.uint8):
                scales = f"{name} scales"
                expected[scales] = expected.get(scales, 0) + 4 * -(-param.numel() // 256)
    report = optimizer.memory_report()
    assert report.host == expected and report.device == {}


def test_a_report_makes_no_state_and_a_copy_starts_anew():
    optimizer = FusedAdam(with_grads())
    assert set(optimizer.memory_report().host) == {"weights", "grads"} and len(optimizer.state) == 0
    assert optimizer.memory_report().step_device is None and optimizer.memory_report().export_host is None
    optimizer.step()
    optimizer.state_dict()
    assert optimizer.memory_report().step_device == 0
    again = copy.deepcopy(optimizer).memory_report()
    assert again.step_device is None and again.export_host is None


def test_what_is_there_twice_counts_once():
    weight = torch.nn.Parameter(torch.zeros(100))
    tied = torch.nn.Parameter(weight.data)
    assert FusedAdam([weight, tied]).memory_report().host["weights"] == 400


def test_views_of_one_buffer_count_each():
    buffer = torch.zeros(300)
    params = [torch.nn.Parameter(part) for part in buffer.split(100)]
    assert FusedAdam(params).memory_report().host["weights"] == 1200


@pytest.mark.parametrize("offload", [True, False], ids=["to the host", "on the device"])
def test_an_export_took_what_live_bytes_say(offload):
    with fake_cuda_world((8,)) as mesh, torch.no_grad(), LiveBytes() as live:
        params = [sharded(mesh, (8 * 512, 1024)) for _ in range(3)]
        optimizer = FusedAdam(
            params,
            master_weights=True,
            exp_avg_dtype="bf16",
            exp_avg_sq_dtype="bf16",
            state_dict_cpu_offload=offload,
            export_staging_bytes=MiB,
        )
        live.mark()
        optimizer.step()
        made = live.kept
        live.mark()
        exported = optimizer.state_dict()
        report = optimizer.memory_report()
        assert report.export_device == live.extra > 0
        n = 3 * 512 * 1024
        assert report.export_host == (12 * n + 12 if offload else 0)  # and the copied step counters
        state = sum(nbytes for kind, nbytes in report.device.items() if kind not in ("weights", "grads"))
        assert state == made == 8 * n and report.step_device == 0
        assert exported["state"]


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_a_streamed_step_took_what_live_bytes_say(name, monkeypatch):
    monkeypatch.setattr(offload_optimizer, "device_for", lambda _: FakeCuda())
    with fake_cuda_world((8,)) as mesh, torch.no_grad(), LiveBytes() as live:
        params = [sharded(mesh, (8 * 256, 256)) for _ in range(6)]
        inner = FusedAdam(params, exp_avg_dtype="bf16") if name == "fused_adam" else torch.optim.AdamW(params)
        optimizer = CPUOffloadOptimizer(inner, MiB * 3 if name == "adamw" else MiB)
        assert optimizer.memory_report().step_device is None
        optimizer.step()  # AdamW makes its state in the first
        live.mark()
        optimizer.step()
        report = optimizer.memory_report()
        assert 0 < report.step_device <= optimizer.step_chunk_bytes
        # AdamW's own arithmetic comes on top of what was streamed
        assert report.step_device == live.extra if name == "fused_adam" else report.step_device < live.extra
        assert set(report.device) == {"weights", "grads"}
        per_element = {"exp_avg": 2, "exp_avg_sq": 4} if name == "fused_adam" else {"exp_avg": 2, "exp_avg_sq": 2}
        for kind, size in per_element.items():
            assert report.host[kind] == 6 * 256 * 256 * size


def test_state_that_is_streamed_counts_with_its_padding_and_as_pinned_bytes_say():
    optimizer = CPUOffloadOptimizer(FusedAdam(with_grads()), 10_000)
    report = optimizer.memory_report()
    assert report.host["exp_avg"] == 4 * (3072 + 256 + 4096)
    assert report.host["exp_avg"] + report.host["exp_avg_sq"] == optimizer.host_state_bytes
    assert report.pinned == optimizer.pinned_bytes == 0


def test_a_skipped_step_took_nothing():
    optimizer = CPUOffloadOptimizer(FusedAdam(with_grads()), 10_000)
    optimizer.step()
    assert optimizer.memory_report().step_device > 0
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    assert optimizer.memory_report().step_device == 0


@pytest.mark.parametrize("snapshot", [True, False])
def test_an_export_of_another_optimizer(snapshot):
    params = with_grads()
    optimizer = CPUOffloadOptimizer(torch.optim.SGD(params, momentum=0.9), None, state_dict_snapshot=snapshot)
    optimizer.step()
    optimizer.state_dict()
    report = optimizer.memory_report()
    assert report.export_host == (4 * ELEMENTS if snapshot else 0)
    assert report.step_device >= 2 * 4 * ELEMENTS  # momentum, and what restores the weights


def test_one_pass_of_what_is_not_elementwise():
    optimizer = CPUOffloadOptimizer(SignDescent(with_grads()), per_parameter=False)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.host["momentum"] == 4 * ELEMENTS and report.step_device == 2 * 4 * ELEMENTS


def test_scalars_are_flat_numbers_for_a_logger_and_text_is_a_table():
    optimizer = FusedAdam(with_grads())
    optimizer.step()
    report = optimizer.memory_report()
    scalars = report.scalars()
    assert scalars["memory/host/exp_avg"] == 4 * ELEMENTS and scalars["memory/step_device"] == 0
    assert "memory/export_host" not in scalars
    assert all(isinstance(value, int) for value in scalars.values())
    assert set(report.scalars("")) == {name.removeprefix("memory/") for name in scalars}
    assert "exp_avg_sq" in str(report) and f"{4 * ELEMENTS:,}" in str(report)


def test_the_table_is_plain_text_in_columns():
    report = MemoryReport({"weights": 1_000}, {"weights": 20, "exp_avg": 4_000_000}, step_device=0, export_host=7)
    assert str(report).splitlines() == [
        "bytes                device       host",
        "--------------------------------------",
        "weights               1,000         20",
        "exp_avg                      4,000,000",
        "--------------------------------------",
        "in all                1,000  4,000,020",
        "last step: on top         0",
        "last export: on top                  7",
    ]
    assert str(MemoryReport()).splitlines() == [
        "bytes                device  host",
        "---------------------------------",
        "in all                    0     0",
        "last step: on top",
        "last export: on top",
    ]


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: CPUOffloadOptimizer(o, 10_000)], ids=["resident", "offloaded"])
def test_the_hook_logs_every_so_many_steps_until_it_is_removed(wrap):
    optimizer = wrap(FusedAdam(with_grads()))
    seen = []
    handle = log_memory(optimizer, seen.append, every=3)
    for _ in range(7):
        optimizer.step()
    assert len(seen) == 2 and seen[0]["memory/host/weights"] == 4 * ELEMENTS
    handle.remove()
    for _ in range(3):
        optimizer.step()
    assert len(seen) == 2
    for every in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="every"):
            log_memory(optimizer, seen.append, every=every)
