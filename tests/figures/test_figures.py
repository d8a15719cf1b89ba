"""Every benchmark runs, on little, and README holds no other figures than they wrote. No time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from statestream import FusedAdam

from benchmarks import gpu_step, host_step, readme

ROOT = Path(__file__).parents[2]

LITTLE = {
    "cpu_step": ["--elements", "5000", "--rounds", "1", "--loop-ms", "1"],
    "host_step": ["--elements", "5000", "--rounds", "1"],
    "overhead": ["--parameters", "10", "--rounds", "1"],
    "export_time": ["--elements", "5000", "--rounds", "1"],
    "offload_step": ["--gigabytes", "1", "--rounds", "1"],
    "moment_formats": ["--steps", "3"],
    "growth": ["--most-elements", "2000000", "--most-tensors", "10", "--streamed-elements", "300000", "--rounds", "1"],
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"STATESTREAM_RESULTS": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LITTLE)
def test_runs_and_writes_what_it_found(name, tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("STATESTREAM_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", *LITTLE[name]])
    import_module(f"benchmarks.{name}").main()
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["rows"] and all(len(row) == len(report["columns"]) for row in report["rows"])
    assert f"torch {torch.__version__}" in report["machine"]
    assert (tmp_path / f"{name}.md").read_text().startswith(f"# {report['title']}")


@pytest.mark.parametrize("installed", [True, False])
def test_a_step_on_the_host_is_beside_every_peer_or_says_which_is_missing(installed, monkeypatch):
    peer = (lambda params, adamw_mode, **rest: torch.optim.AdamW(params, **rest)) if installed else None
    monkeypatch.setattr(host_step, "imported", lambda *_: peer)
    report = host_step.measure(5000, 1)
    measured = [row[report.columns.index("optimizer")] for row in report.rows]
    assert all(
        measured.count(name) == len(host_step.MODES) for name in ("statestream", "torch.optim.AdamW(fused=True)")
    )
    assert measured.count("DeepSpeedCPUAdam") == installed * len(host_step.MODES)
    assert ("DeepSpeedCPUAdam is not here: it is not installed" in " ".join(report.notes)) == (not installed)


@pytest.mark.parametrize("mode", host_step.MODES, ids=lambda mode: mode.name)
def test_everyone_on_the_host_does_the_same_work(mode):
    """The same weights after two steps, to the last place of BF16 or nearly that of FP32."""
    torch.manual_seed(0)
    start = host_step.parameter(mode, 1000)
    ends = {}
    for name, make in {"statestream": host_step.statestream, **host_step.PEERS}.items():
        param = torch.nn.Parameter(start.detach().clone())
        param.grad = start.grad.clone()
        step = make(param, mode)
        if step is not None:
            step(), step()
            ends[name] = param.detach()
    assert len(ends) >= 2 and not torch.equal(ends["statestream"], start)
    for name, end in ends.items():
        close = {"rtol": 2**-7, "atol": 2e-4} if mode.weights is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(end, ends["statestream"], **close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("name", ["gpu_step", "gpu_day"])
def test_without_a_gpu_its_benchmark_says_so_and_writes_nothing(name, tmp_path):
    done = run(tmp_path, f"benchmarks.{name}")
    assert done.returncode == 1 and "no CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", gpu_step.MODES, ids=lambda mode: mode.name)
def test_the_bytes_of_a_gpu_step_are_those_of_its_tensors(mode):
    """Tensors are read and written; gradients are only read, and parameters that have a whole master only written."""
    param = torch.nn.Parameter(torch.ones(256 * 8, dtype=mode.param))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], stochastic_rounding=mode.stochastic, **mode.arguments)
    optimizer.step()
    held = optimizer.memory_report().host
    grads, weights = held.pop("grads"), held.pop("weights")
    state = sum(held.values()) - held["step"]
    weights *= 1 if mode.master in ("fp32", "fp16") else 2
    assert mode.bytes_per_element == (grads + weights + 2 * state) / param.numel()


def test_readme_has_the_figures_that_were_written_and_no_others():
    text = readme.README.read_text()
    assert readme.with_table(text) == text, "make them with: python -m benchmarks --table-only"


def test_control_a_figure_that_was_typed_in_is_found():
    text = readme.README.read_text()
    typed = text.replace(readme.END, "| faster than anything | 100 x |\n" + readme.END)
    assert readme.with_table(typed) == text


def test_a_readme_without_a_place_for_figures_is_refused():
    with pytest.raises(ValueError, match=r"README\.md: no place"):
        readme.with_table("# statestream\n")


def test_an_unknown_benchmark_is_one_clear_line(tmp_path):
    done = run(tmp_path, "benchmarks", "nonsense")
    assert done.returncode == 2 and "'nonsense' is no benchmark" in done.stderr and "Traceback" not in done.stderr
