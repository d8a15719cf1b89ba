"""Limits on the machine code of the kernels, which say how fast they can be where there is no GPU to time them."""

import json
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from . import disassembly
from .disassembly import ARCHS, Kernel, find, kernels, kernels_of

HERE = Path(__file__).parent
RULES = json.loads((HERE / "limits.json").read_text())["rules"]

pytestmark = [
    pytest.mark.skipif(find("nvcc") is None, reason="SASS gates need nvcc (CUDA_HOME, PATH or nvidia-cuda-nvcc)"),
    pytest.mark.skipif(find("nvdisasm") is None, reason="SASS gates need nvdisasm (PATH or nvidia-cuda-nvdisasm)"),
    pytest.mark.timeout(600),
]


def breaches(kernel: Kernel) -> list[str]:
    """What a kernel exceeds of the rules that it matches."""
    found = []
    for rule in RULES:
        if kernel.arch not in rule["archs"] or not fnmatchcase(kernel.name, rule["kernel"]):
            continue
        for what, limit in rule.items():
            if what in ("kernel", "archs"):
                continue
            value = getattr(kernel, what)
            if value != limit if what.startswith("wide") else value > limit:
                found.append(f"sm_{kernel.arch} {kernel.name}: {what} {value}, limit {limit}")
    return found


def bytes_of(name: str) -> tuple[int, int]:
    """Bytes that an adam_kernel loads and stores an element, from the formats in its name."""
    weight, grad, exp_avg, exp_avg_sq = re.fullmatch(r"adam_kernel<(.+), (\w+), (\w+), (\w+)>", name).groups()
    width = {"Float32": 4, "BFloat16": 2}
    loaded, stored = {
        "PlainWeight<Float32>": (4, 4),
        "PlainWeight<BFloat16>": (2, 2),
        "MasterWeight": (4, 6),  # the BF16 weight is written only
        "RemainderWeight": (4, 4),
    }[weight]
    moments = width[exp_avg] + width[exp_avg_sq]
    return loaded + width[grad] + moments, stored + moments


# Compiling takes four seconds an architecture.
archs = pytest.mark.parametrize("arch", [a if a <= 90 else pytest.param(a, marks=pytest.mark.long) for a in ARCHS])


@archs
def test_no_kernel_exceeds_its_limits(arch):
    assert [breach for kernel in kernels(arch) for breach in breaches(kernel)] == []


@archs
def test_every_byte_moves_by_128_bit_accesses(arch):
    adam = [k for k in kernels(arch) if k.name.startswith("adam_kernel")]
    assert len(adam) == 32
    for kernel in adam:
        loaded, stored = bytes_of(kernel.name)
        assert (kernel.wide_loads, kernel.wide_stores) == (loaded * 8 // 16, stored * 8 // 16), kernel.name


@archs
def test_every_kernel_has_a_register_limit_of_its_own(arch):
    for kernel in kernels(arch):
        matching = [r for r in RULES if kernel.arch in r["archs"] and fnmatchcase(kernel.name, r["kernel"])]
        assert any("registers" in rule for rule in matching), kernel.name


@archs
def test_spills_and_narrow_accesses_are_seen(arch):
    planted = {kernel.name: kernel for kernel in kernels_of(HERE / "planted.cu", arch)}
    spills, narrow = planted["spills"], planted["narrow_stores"]
    assert any("spill_bytes" in breach for breach in breaches(spills))
    assert any("narrow_accesses 4" in breach for breach in breaches(narrow))
    assert (narrow.wide_loads, narrow.wide_stores) == (1, 0)


def test_runs_beside_each_other_find_a_kept_disassembly_whole(tmp_path, monkeypatch):
    """What a compilation leaves for the next run is there at once or not at all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(disassembly, "_version", lambda tool: "1.0")
    monkeypatch.setattr(disassembly, "_call", _compiler_that_takes_no_time)
    sources = [tmp_path / f"{k}.cu" for k in range(40)]
    for source in sources:
        source.write_text(source.name)
    start = threading.Barrier(4)

    def run(_):
        start.wait()
        return [disassembly._compiled(source, 80) for source in sources]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            assert found == [("report", "sass")] * len(sources)
    assert sum(path.is_dir() for path in tmp_path.glob("statestream-sass-*")) == len(sources)
    assert not list(tmp_path.glob("tmp*"))


def _compiler_that_takes_no_time(command):
    if "-o" in command:
        Path(command[-1]).touch()
        return "report"
    return "sass"
