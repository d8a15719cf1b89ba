"""The checks, each by itself: one that fails leaves the others to speak."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from statestream import __version__
from statestream.doctor.findings import Finding, Verdict

__all__ = ["examine"]

OLDEST_TORCH = (2, 9)
OLDEST_DRIVER = 12010
_REBUILD = "build it: pip install --force-reinstall --no-deps statestream (from a checkout: pip install .)"
_BUILD_CUDA = "put nvcc 12.1 or later on PATH (or in CUDA_HOME) and build: STATESTREAM_CUDA=1 pip install ."
_PIN_BYTES = 64 << 20

Findings = Iterator[Finding]


def examine(only: Callable[[str], bool] = lambda name: True) -> Findings:
    """Every finding, in the order of one's dependence on another."""
    for check in (versions, cpu_kernels, threads, driver, torch_cuda, cuda_module, gpus, locked_memory, bits):
        if not only(check.__name__):
            continue
        try:
            yield from check()
        except Exception as error:  # a broken machine may break a check in any way: that is a finding too
            said = f"the check itself failed: {type(error).__name__}: {error}"
            yield Finding(check.__name__, Verdict.PROBLEM, said, "report this with all that is printed here")


def versions() -> Findings:
    here = f"statestream {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    try:
        import torch
    except Exception as error:  # also what a damaged installation raises
        yield Finding(
            "versions", Verdict.PROBLEM, f"{here}; torch cannot be imported: {error}", "install torch 2.9 or later"
        )
        return
    here += f", torch {torch.__version__}"
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
    if found < OLDEST_TORCH:
        yield Finding("versions", Verdict.PROBLEM, here, "install torch 2.9 or later")
    else:
        yield Finding("versions", Verdict.OK, here)


def cpu_kernels() -> Findings:
    try:
        cpu = importlib.import_module("statestream._cpu")
    except ImportError as error:
        yield Finding("CPU kernels", Verdict.PROBLEM, f"cannot be imported: {error}", _REBUILD)
        return
    yield Finding("CPU kernels", Verdict.OK, f"{cpu.isa()}, of {', '.join(cpu.isas())} on this processor")


def threads() -> Findings:
    if not _has_cpu():
        return
    from statestream import kernels

    try:
        yield Finding("threads", Verdict.OK, f"{kernels.num_threads()} for CPU kernels, of {os.cpu_count()} processors")
    except ValueError as error:
        yield Finding("threads", Verdict.PROBLEM, str(error), "unset STATESTREAM_NUM_THREADS, or give it a number")


def driver() -> Findings:
    version = _driver_version()
    if version is None:
        yield Finding("NVIDIA driver", Verdict.NOTE, "none: everything runs on the CPU")
        return
    text = f"serves CUDA {version // 1000}.{version % 1000 // 10}"
    if version < OLDEST_DRIVER:
        advice = "update it to 530 or later: kernels have up to 32 KB of parameters, which came with CUDA 12.1"
        yield Finding("NVIDIA driver", Verdict.PROBLEM, text, advice)
    else:
        yield Finding("NVIDIA driver", Verdict.OK, text)


def torch_cuda() -> Findings:
    import torch

    built = torch.version.cuda
    if _driver_version() is None:
        yield Finding("torch", Verdict.NOTE, "built for the CPU alone" if built is None else f"built for CUDA {built}")
    elif built is None:
        advice = "install a CUDA build of torch: pytorch.org says which"
        yield Finding("torch", Verdict.PROBLEM, "built for the CPU alone, and there is an NVIDIA driver", advice)
    elif not torch.cuda.is_available():
        advice = "see that CUDA_VISIBLE_DEVICES shows a GPU, and that the driver is as new as torch's CUDA"
        yield Finding("torch", Verdict.PROBLEM, f"built for CUDA {built}, and finds no usable GPU", advice)
    else:
        yield Finding("torch", Verdict.OK, f"built for CUDA {built}, finds {torch.cuda.device_count()} GPU(s)")


def cuda_module() -> Findings:
    import torch

    needed = torch.cuda.is_available()
    if importlib.util.find_spec("statestream._cuda") is None:
        if needed:
            yield Finding("CUDA kernels", Verdict.PROBLEM, "not built, and there is a GPU", _BUILD_CUDA)
        else:
            yield Finding("CUDA kernels", Verdict.NOTE, "not built; nothing here would use them")
        return
    try:
        cuda = importlib.import_module("statestream._cuda")
    except ImportError as error:
        verdict = Verdict.PROBLEM if needed else Verdict.NOTE
        yield Finding("CUDA kernels", verdict, f"cannot be imported: {error}", _REBUILD)
        return
    yield Finding(
        "CUDA kernels", Verdict.OK if needed else Verdict.NOTE, f"built for compute capabilities {cuda.ARCHS}"
    )


def gpus() -> Findings:
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("statestream._cuda") is None:
        return
    cuda = importlib.import_module("statestream._cuda")
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            reason = cuda.why_not(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        text = f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB"
        if reason:
            yield Finding(f"cuda:{index}", Verdict.PROBLEM, f"{text}: {reason}", f"as it says; else {_BUILD_CUDA}")
        else:
            yield Finding(f"cuda:{index}", Verdict.OK, text)


def locked_memory() -> Findings:
    """Offloaded state and exports are pinned where there is a GPU. Whether a driver counts that against the limit of
    locked memory differs, so that the only answer is to pin some."""
    import torch

    limit = _locked_limit()
    said = "" if limit is None else f"the limit of locked memory (ulimit -l) is {limit}"
    if not torch.cuda.is_available():
        if said:
            yield Finding("pinned memory", Verdict.NOTE, f"{said}; without a GPU nothing is pinned")
        return
    try:
        torch.empty(_PIN_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        text = f"{_PIN_BYTES >> 20} MiB could not be pinned ({reason}); {said or 'no limit is known'}"
        advice = (
            "raise it: ulimit -l unlimited; in Docker --ulimit memlock=-1; in Slurm propagate it; or free host memory"
        )
        yield Finding("pinned memory", Verdict.PROBLEM, text, advice)
        return
    yield Finding("pinned memory", Verdict.OK, f"{_PIN_BYTES >> 20} MiB were pinned; {said or 'no limit is known'}")


def bits() -> Findings:
    if not _has_cpu():
        return
    import torch

    from statestream import _cpu, kernels
    from statestream.doctor.self_test import CASES, differing

    began, used = time.perf_counter(), _cpu.isa()
    tried: dict[str, list[str]] = {}
    try:
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            tried[f"the CPU's instruction set {isa}"] = differing(torch.device("cpu"))
    finally:
        _cpu.use_isa(used)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        try:
            kernels.has_adam(device, kernels.Formats(*(kernels.FLOAT32,) * 4, kernels.NONE))
        except (ImportError, RuntimeError):
            continue  # the checks above have said why
        tried[str(device)] = differing(device)
    wrong = [f"{where} ({', '.join(cases)})" for where, cases in tried.items() if cases]
    if wrong:
        advice = "do not train on this: rebuild without compiler flags of your own, and report it"
        yield Finding("bits", Verdict.PROBLEM, f"not the promised ones on {'; '.join(wrong)}", advice)
        return
    seconds = time.perf_counter() - began
    text = f"as promised: {len(CASES)} ways of storing on {', '.join(tried)}, {seconds:.1f} s"
    yield Finding("bits", Verdict.OK, text)


def _has_cpu() -> bool:
    try:
        importlib.import_module("statestream._cpu")
    except ImportError:
        return False
    return True


def _driver_version() -> int | None:
    """CUDA's version, as 12080 for 12.8, that the driver serves; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _locked_limit() -> str | None:
    if not Path("/proc/self/limits").exists() and sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
