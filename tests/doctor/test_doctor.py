"""`statestream doctor`: well here; and each fault that a machine may have is a problem with advice and status 1."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time

import pytest
import torch
from statestream import __version__, _cpu, kernels
from statestream.doctor import checks, self_test
from statestream.doctor.checks import examine
from statestream.doctor.findings import Finding, Verdict


def found(*names: str) -> dict[str, Finding]:
    """By subject: what the named checks say."""
    return {finding.subject: finding for finding in examine(lambda name: name in names)}


def run_alone(*args: str, code: str = "", **environment: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, after `code`."""
    script = f"{code}\nimport sys\nfrom statestream.cli import main\nmain({['doctor', *args]!r})"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is well without a GPU")
def test_this_machine_is_well(command):
    began = time.process_time()
    ran = command("doctor")
    assert (ran.status, ran.err) == (0, ""), ran.out
    for said in (__version__, torch.__version__, _cpu.isa(), "as promised", "ulimit -l", "0 problems"):
        assert said in ran.out
    assert time.process_time() - began < 10  # about two; waiting for other work does not count


def test_json_is_all_of_stdout(command):
    made = json.loads(command("doctor", "--json").out)
    assert {"versions", "CPU kernels", "bits"} <= {finding["subject"] for finding in made["findings"]}
    assert all(f["advice"] for f in made["findings"] if f["verdict"] == "problem")


@pytest.mark.parametrize("args", [["--frobnicate"], ["extra"], ["--json", "more"]])
def test_bad_input_is_one_line_and_status_2(command, args):
    ran = command("doctor", *args)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_one_wrong_bit_with_one_instruction_set_is_found(monkeypatch, command):
    broken = _cpu.isas()[-1]
    update = kernels.adam

    def adam(device, rows, formats, *args, **kwargs):
        update(device, rows, formats, *args, **kwargs)
        if _cpu.isa() == broken:
            word = ctypes.c_uint16.from_address(rows[1] + 2)  # the second weight
            word.value ^= 1

    monkeypatch.setattr(kernels, "adam", adam)
    before = _cpu.isa()
    ran = command("doctor")
    assert ran.status == 1 and "1 problem\n" in ran.out
    assert f"not the promised ones on the CPU's instruction set {broken} (" in ran.out and "do not train" in ran.out
    assert all(isa == broken or f"instruction set {isa} (" not in ran.out for isa in _cpu.isas())
    assert _cpu.isa() == before


def test_a_checksum_of_other_steps_is_no_checksum(monkeypatch):
    monkeypatch.setattr(self_test, "STEPS", self_test.STEPS + 1)
    assert self_test.differing(torch.device("cpu")) == list(self_test.CASES)


def test_a_missing_cpu_module_is_said_without_a_traceback():
    done = run_alone(code="import sys; sys.modules['statestream._cpu'] = None")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "CPU kernels: cannot be imported" in done.stdout and "what to do: build it" in done.stdout
    assert "versions" in done.stdout and "1 problem\n" in done.stdout


def test_a_missing_torch_is_said_without_a_traceback():
    done = run_alone(code="import sys; sys.modules['torch'] = None")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "torch cannot be imported" in done.stdout and "install torch 2.9 or later" in done.stdout


def test_an_old_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu126")
    assert found("versions")["versions"].verdict is Verdict.PROBLEM
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git12")
    assert found("versions")["versions"].verdict is Verdict.OK


def test_a_number_of_threads_that_is_none_is_a_problem(monkeypatch):
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", "many")
    finding = found("threads")["threads"]
    assert finding.verdict is Verdict.PROBLEM and "'many'" in finding.text


class Properties:
    total_memory = 80 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as torch and the driver say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(checks, "_driver_version", lambda: 13010)


def test_a_gpu_without_the_cuda_module_is_a_problem(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = found("driver", "torch_cuda", "cuda_module", "gpus")
    assert said["NVIDIA driver"].text == "serves CUDA 13.1"
    assert said["CUDA kernels"].verdict is Verdict.PROBLEM and "STATESTREAM_CUDA=1" in said["CUDA kernels"].advice
    assert "cuda:0" not in said


@pytest.mark.parametrize(("version", "verdict"), [(12000, Verdict.PROBLEM), (12010, Verdict.OK)])
def test_a_driver_that_is_too_old_for_the_kernels_is_a_problem(gpu, monkeypatch, version, verdict):
    monkeypatch.setattr(checks, "_driver_version", lambda: version)
    finding = found("driver")["NVIDIA driver"]
    assert finding.verdict is verdict
    assert finding.verdict is Verdict.OK or "530 or later" in finding.advice


class CudaModule:
    ARCHS = "80;90"

    def __init__(self, reason: str):
        self.why_not = lambda index: reason


@pytest.mark.parametrize("reason", ["", "its compute capability is 7.5, and statestream needs 8.0 or later"])
def test_each_gpu_says_whether_the_build_serves_it(gpu, monkeypatch, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "statestream._cuda", CudaModule(reason))
    said = found("cuda_module", "gpus")
    assert said["CUDA kernels"].verdict is Verdict.OK and "80;90" in said["CUDA kernels"].text
    assert said["cuda:0"].text.startswith("a GPU, 80 GiB")
    assert said["cuda:0"].verdict is (Verdict.PROBLEM if reason else Verdict.OK) and reason in said["cuda:0"].text


def test_a_torch_without_cuda_beside_a_driver_is_a_problem(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found("torch_cuda")["torch"].verdict is Verdict.PROBLEM
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found("torch_cuda")["torch"].verdict is Verdict.OK
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("torch_cuda")["torch"].verdict is Verdict.PROBLEM


def test_memory_that_cannot_be_pinned_is_a_problem(gpu, monkeypatch):
    empty = torch.empty
    asked = []

    def refuse(*size, pin_memory=False, **where):
        asked.append(pin_memory)
        if pin_memory and refusing:
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return empty(*size, **where)

    monkeypatch.setattr(torch, "empty", refuse)
    refusing = True
    finding = found("locked_memory")["pinned memory"]
    assert finding.verdict is Verdict.PROBLEM and "ulimit -l unlimited" in finding.advice
    assert "\n" not in finding.text and "out of memory" in finding.text
    refusing = False
    assert found("locked_memory")["pinned memory"].verdict is Verdict.OK
    assert asked == [True, True]


def test_the_limit_of_locked_memory_is_the_processes_own(monkeypatch):
    code = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096 << 10, 4096 << 10))"
    assert "(ulimit -l) is 4096 KiB" in run_alone(code=code).stdout
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "is unlimited" in found("locked_memory")["pinned memory"].text


def test_a_check_that_breaks_is_a_problem_and_the_others_speak(monkeypatch):
    def broken():
        raise OSError("no such device")
        yield

    broken.__name__ = "threads"
    monkeypatch.setattr(checks, "threads", broken)
    said = found("threads", "cpu_kernels")
    assert said["threads"].verdict is Verdict.PROBLEM and "no such device" in said["threads"].text
    assert said["CPU kernels"].verdict is Verdict.OK
