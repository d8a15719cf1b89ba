"""The wheel with CUDA kernels, built by nvcc; it imports where there is neither a GPU nor a driver."""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pybind11
import pytest

pytestmark = pytest.mark.timeout(900)

UNITS = {"adam.cu", "convert.cu", "device.cu", "generic.cu"}
"""What nvcc compiles."""
BUILDS_ALL = pytest.mark.long
"""nvcc takes minutes for all architectures; .ci/run has these too."""


@pytest.fixture(scope="session")
def cuda_wheel(sdist, bare_python, tmp_path_factory) -> Path:
    """The wheel that the sdist becomes with STATESTREAM_CUDA=1 and the default architectures."""
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        pytest.skip("the wheel with CUDA kernels needs nvcc in CUDA_HOME or on PATH")
    folder = tmp_path_factory.mktemp("cuda_wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (folder / "source").iterdir()
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "STATESTREAM_CUDA_ARCHS")}
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    env["STATESTREAM_CUDA"] = "1"
    done = subprocess.run([bare_python, "-c", code], cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed_cuda(cuda_wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed_cuda")
    with zipfile.ZipFile(cuda_wheel) as archive:
        archive.extractall(folder)
    return folder


REFERENCE = """
#include <map>
#include <pybind11/stl.h>
#include <regex>
#include <string>
#include <vector>
PYBIND11_MODULE(reference, m) {
    m.def("match", [](const std::string& text, const std::vector<std::string>& patterns) {
        std::map<std::string, bool> found;
        for (const auto& pattern : patterns) found[pattern] = std::regex_match(text, std::regex(pattern));
        return found;
    });
}
"""
"""Ordinary templates: processors differ in speed, and what they compile does not."""


@BUILDS_ALL
def test_wheel_is_small_and_soon_built(sdist, bare_python, request, tmp_path):
    spent = processor_seconds()
    wheel = request.getfixturevalue("cuda_wheel")
    build = processor_seconds() - spent
    (tmp_path / "reference.cpp").write_text(REFERENCE)
    include = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    spent = processor_seconds()
    subprocess.run(["c++", "-std=c++17", "-O3", "-fPIC", *include, "-c", "reference.cpp"], cwd=tmp_path, check=True)
    assert build < 16 * (processor_seconds() - spent)  # measured: 9.6
    assert wheel.stat().st_size < 2_000_000


def processor_seconds() -> float:
    """Of the processes that have ended, however busy the processors are."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@BUILDS_ALL
def test_wheel_holds_both_modules_and_no_emulation(cuda_wheel):
    names = zipfile.ZipFile(cuda_wheel).namelist()
    native = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert native == {"statestream/_cpu", "statestream/_cuda"}
    assert not [name for name in names if "emulat" in name or name.endswith((".cu", ".cuh", ".h", ".o"))]


@BUILDS_ALL
def test_cuda_runtime_is_inside_and_hidden(installed_cuda):
    """torch brings a runtime of its own: neither may find the other's functions."""
    (module,) = (installed_cuda / "statestream").glob("_cuda*.so")
    shown = subprocess.run(["nm", "-DC", "--defined-only", module], check=True, capture_output=True, text=True).stdout
    symbols = [line.split(maxsplit=2)[2] for line in shown.splitlines()]
    assert "PyInit__cuda" in symbols
    assert [s for s in symbols if re.match(r"_*(cuda|cu[A-Z])|statestream::", s)] == []
    needed = subprocess.run(["readelf", "-d", module], check=True, capture_output=True, text=True).stdout
    assert "libcudart" not in needed
    assert "libcuda." not in needed


@BUILDS_ALL
@pytest.mark.parametrize("order", ["torch, statestream._cuda as cuda", "statestream._cuda as cuda, torch"])
def test_module_imports_beside_torch_in_either_order(installed_cuda, order, tmp_path):
    code = f"""
import {order}
weights = [(1, 0), (2, 0), (2, 1), (2, 3)]
for (param, master), *rest in __import__("itertools").product(weights, (1, 2), (1, 2), (1, 2)):
    assert cuda.has_adam((param, *rest, master))
assert not cuda.has_adam((1, 1, 1, 1, 1))
assert cuda.ARCHS == "80+PTX;90;100;120", cuda.ARCHS
assert bool(cuda.why_not(0)) != torch.cuda.is_available(), cuda.why_not(0)
print(torch.ones(3).sum())
"""
    env = {**os.environ, "PYTHONPATH": str(installed_cuda)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@BUILDS_ALL
def test_module_has_code_for_each_architecture(installed_cuda):
    tool = shutil.which("cuobjdump") or next(
        (str(p) for p in Path(sys.prefix).glob("lib/python*/site-packages/triton/backends/nvidia/bin/cuobjdump")), None
    )
    if tool is None:
        pytest.skip("listing the architectures of a module needs cuobjdump")
    (module,) = (installed_cuda / "statestream").glob("_cuda*.so")
    elves, texts = (
        subprocess.run([tool, option, module], check=True, capture_output=True, text=True).stdout
        for option in ("--list-elf", "--list-ptx")
    )
    assert set(re.findall(r"sm_(\d+)\.cubin", elves)) == {"80", "90", "100", "120"}
    assert set(re.findall(r"sm_(\d+)\.ptx", texts)) == {"80"}


CALL = """
import array, statestream._cuda as cuda
good = dict(lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=0.0, decoupled=True, bias_correction=True,
            maximize=False, grad_scale=1.0, advance=True, device=0, stream=0)
row = [8, 64, 64, 64, 64, 0, 64, 0]
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""


@BUILDS_ALL
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("cuda.adam(array.array('q', [8, 66, *row[2:]]), (1, 1, 1, 1, 0), **good)", "ValueError row 0: param is not"),
        ("cuda.adam(array.array('q', [8, 0, *row[2:]]), (1, 1, 1, 1, 0), **good)", "ValueError row 0: param is a null"),
        ("cuda.adam(array.array('q', row), (1, 1, 1, 1, 1), **good)", "ValueError row 0: master_param is a null"),
        ("cuda.adam(array.array('q', []), (1, 1, 1, 1, 1), **good)", "ValueError no CUDA kernel for these formats"),
        ("cuda.adam(array.array('q', row[:7]), (1, 1, 1, 1, 0), **good)", "ValueError rows must be"),
        ("cuda.adam(array.array('d', row), (1, 1, 1, 1, 0), **good)", "ValueError rows must be"),
        ("cuda.adam(array.array('q', [2**62, *row[1:]]), (2, 2, 2, 2, 0), **good)", "ValueError row 0: param runs"),
        ("cuda.adam(array.array('q', row), (1, 1, 1, 1, 0), **good, lr_address=64)", "ValueError addresses of scalars"),
        ("cuda.adam(array.array('q', row), (1, 1, 1, 1, 0), **good, capturable=True)", "ValueError row 0: scratch"),
        ("cuda.decode(3, 64, 64, 8, device=0, stream=0)", "ValueError no CUDA kernel for these formats"),
        ("cuda.encode(2, 64, 63, 8, device=0, stream=0)", "ValueError row 0: destination is not aligned"),
        ("cuda.refresh_master(64, 64, -1, device=0, stream=0)", "ValueError n is negative"),
        ("cuda.advance_steps(array.array('d', [64]), device=0, stream=0)", "ValueError counters must be"),
        ("cuda.advance_steps(array.array('q', [0]), device=0, stream=0)", "ValueError row 0: step is a null"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(installed_cuda, call, said):
    env = {**os.environ, "PYTHONPATH": str(installed_cuda)}
    code = CALL.format(call=call)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(said), done.stdout + done.stderr


@BUILDS_ALL
def test_errors_carry_cudas_name(installed_cuda):
    """There is no such device, on any machine: CUDA's own words come through."""
    env = {**os.environ, "PYTHONPATH": str(installed_cuda)}
    code = CALL.format(call="cuda.adam(array.array('q', []), (1, 1, 1, 1, 0), **{**good, 'device': 99})")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert re.match(r"RuntimeError cudaError\w+ in cuda\w+: ", done.stdout), done.stdout + done.stderr


# ---- how nvcc is found and asked; a stand-in for it makes empty objects at once ----

FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88";;
  *--list-gpu-code*) echo "sm_75 sm_80 sm_86 sm_90 {newest}";;
  *--dryrun*) echo "#$ TOP={top}" >&2;;
  *) echo "$@" >> {log}
     while [ "$1" != -o ]; do shift; done
     echo | c++ -x c++ -c - -o "$2";;
esac
"""


class FakeToolkit:
    def __init__(self, folder: Path, release: str = "13.0", newest: str = "sm_100 sm_120", runtime: bool = True):
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "lib64").mkdir()
        if runtime:
            (folder / "lib64" / "libcudart_static.a").write_bytes(b"!<arch>\n")
        text = FAKE_NVCC.format(release=release, newest=newest, top=folder, log=self.log)
        (self.bin / "nvcc").write_text(text)
        (self.bin / "nvcc").chmod(0o755)

    def compiled(self) -> list[str]:
        """The commands since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def source(checkout, tmp_path):
    """A source tree of its own whose C++ is empty: what is seen here is what gets compiled, and how."""
    copy = tmp_path / "source"
    shutil.copytree(checkout, copy)
    for path in (copy / "csrc").rglob("*.cpp"):
        path.write_text("")
    return copy


def build(source, python, env, **settings):
    return subprocess.run(
        [python, "setup.py", "build_ext", "--inplace"],
        cwd=source,
        env={**env, "STATESTREAM_CUDA": "1", **settings},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", "wheel"])
def test_nvcc_is_found(where, source, bare_python, no_nvcc, tmp_path):
    if where == "wheel":
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([bare_python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
        folder = Path(site) / "nvidia" / "cu13"
    else:
        folder = tmp_path / "toolkit"
    toolkit = FakeToolkit(folder)
    settings = {"CUDA_HOME": {"CUDA_HOME": str(folder)}, "PATH": {"PATH": f"{toolkit.bin}:{no_nvcc['PATH']}"}}
    try:
        done = build(source, bare_python, no_nvcc, **settings.get(where, {}))
        assert done.returncode == 0, done.stderr
        commands = toolkit.compiled()
    finally:
        if where == "wheel":
            shutil.rmtree(folder.parent)
    assert {Path(re.search(r"-c (\S+)", c)[1]).name for c in commands} == UNITS
    for command in commands:
        assert "-fmad=false" in command
        assert "--compress-mode=size" in command
        assert re.findall(r",code=(\w+)", command) == ["sm_80", "compute_80", "sm_90", "sm_100", "sm_120"]
    assert list((source / "python" / "statestream").glob("_cuda*.so"))


@pytest.mark.long
def test_only_what_changed_is_compiled_again(source, bare_python, no_nvcc, tmp_path):
    toolkit = FakeToolkit(tmp_path / "toolkit")
    env = {**no_nvcc, "CUDA_HOME": str(tmp_path / "toolkit")}

    def again(**settings):
        done = build(source, bare_python, env, **settings)
        assert done.returncode == 0, done.stderr
        (module,) = (source / "python" / "statestream").glob("_cuda*.so")
        return len(toolkit.compiled()), module.stat().st_mtime_ns

    def later(path):
        """Written anew, past what a file system's clock can hide."""
        newest = max(p.stat().st_mtime for p in source.rglob("*"))
        os.utime(path, (newest + 2, newest + 2))

    count, first = again()
    assert count == len(UNITS)
    assert again() == (0, first)
    count, second = again(STATESTREAM_CUDA_ARCHS="90")
    assert (count, second > first) == (len(UNITS), True)
    assert again(STATESTREAM_CUDA_ARCHS="90") == (0, second)
    later(source / "csrc" / "cuda" / "convert.cu")
    assert again(STATESTREAM_CUDA_ARCHS="90")[0] == 1


@pytest.mark.long
def test_a_changed_header_compiles_all_again(source, bare_python, no_nvcc, tmp_path):
    toolkit = FakeToolkit(tmp_path / "toolkit")
    env = {**no_nvcc, "CUDA_HOME": str(tmp_path / "toolkit")}
    for header in ("csrc/number_formats.h", "csrc/cuda/vectors.cuh"):
        assert build(source, bare_python, env).returncode == 0
        toolkit.compiled()
        newest = max(p.stat().st_mtime for p in source.rglob("*"))
        os.utime(source / header, (newest + 2, newest + 2))
        assert build(source, bare_python, env).returncode == 0
        assert len(toolkit.compiled()) == len(UNITS), header


@pytest.mark.parametrize(
    ("toolkit", "settings", "said"),
    [
        ({"release": "11.8"}, {}, "is of CUDA 11.8; statestream needs 12.1 or later"),
        ({"runtime": False}, {}, "has no libcudart_static.a beside it"),
        ({}, {"STATESTREAM_CUDA_ARCHS": "75"}, "use compute capabilities from 80 on"),
        ({}, {"STATESTREAM_CUDA_ARCHS": "sm_90"}, "use compute capabilities from 80 on"),
        ({}, {"STATESTREAM_CUDA_ARCHS": ""}, "use compute capabilities from 80 on"),
    ],
    ids=["old", "no runtime", "old architecture", "misspelt", "empty"],
)
def test_what_cannot_be_built_with_is_said_in_one_line(
    toolkit, settings, said, checkout, bare_python, no_nvcc, tmp_path
):
    FakeToolkit(tmp_path / "toolkit", **toolkit)
    env = {**no_nvcc, "CUDA_HOME": str(tmp_path / "toolkit")}
    done = build(checkout, bare_python, env, **settings)
    assert done.returncode != 0
    assert re.fullmatch(rf"statestream: STATESTREAM_CUDA=1, but [^\n]*{re.escape(said)}[^\n]*\n", done.stderr)


def test_an_nvcc_that_knows_fewer_architectures_builds_for_those(source, bare_python, no_nvcc, tmp_path):
    toolkit = FakeToolkit(tmp_path / "toolkit", release="12.4", newest="sm_89")
    done = build(source, bare_python, no_nvcc, CUDA_HOME=str(tmp_path / "toolkit"))
    assert done.returncode == 0, done.stderr
    for command in toolkit.compiled():
        assert re.findall(r",code=(\w+)", command) == ["sm_80", "compute_80", "sm_90"]


@pytest.mark.parametrize(("release", "compressed"), [("12.4", False), ("12.9", False), ("13.0", True), ("13.1", True)])
def test_code_is_compressed_only_where_every_driver_that_the_toolkit_needs_can_load_it(
    release, compressed, source, bare_python, no_nvcc, tmp_path
):
    """nvcc 12.8 and 12.9 know the option, and what they make with it drivers of before CUDA 12.4 do not load."""
    toolkit = FakeToolkit(tmp_path / "toolkit", release=release)
    done = build(source, bare_python, no_nvcc, CUDA_HOME=str(tmp_path / "toolkit"))
    assert done.returncode == 0, done.stderr
    assert {"--compress-mode=size" in command for command in toolkit.compiled()} == {compressed}
