"""Timelines by CUDA events, memory reports against torch's allocator, and the doctor, on a real GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import BULK, GPU
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline
from statestream.doctor.checks import examine
from statestream.doctor.findings import Verdict

MIB = (1 << 20) // BULK


@pytest.fixture
def offloaded():
    params = [torch.nn.Parameter(torch.randn(8 * MIB, device=GPU, dtype=torch.bfloat16)) for _ in range(6)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=1e-3, master_weights=True), 96 * MIB)
    optimizer.step()
    torch.cuda.synchronize()
    return optimizer


def test_chunks_are_loaded_updated_and_stored_in_order_and_overlap(offloaded):
    with Timeline(offloaded) as timeline:
        offloaded.step()
    spans = {(span.what, span.chunk): span for span in timeline.spans}
    chunks = len(offloaded.strategy.store.plan.chunks)
    assert len(spans) == 3 * chunks and chunks > 5
    for k in range(chunks):
        load, update, store = (spans[what, k] for what in ("load", "update", "store"))
        assert load.begin < load.end <= update.end and update.begin < update.end <= store.end
    overlapping = sum(spans["load", k + 1].begin < spans["store", k].end for k in range(chunks - 1))
    assert overlapping > chunks // 2


def test_a_step_takes_the_device_memory_that_is_reported(offloaded):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    offloaded.step()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    report = offloaded.memory_report()
    assert taken == pytest.approx(report.step_device, rel=0.05)
    assert report.pinned == offloaded.pinned_bytes > 0
    assert set(report.device) == {"weights", "grads"}


def test_the_doctor_finds_this_machine_well():
    findings = {finding.subject: finding for finding in examine()}
    assert all(finding.verdict is not Verdict.PROBLEM for finding in findings.values()), findings
    assert "cuda:0" in findings["bits"].text
