"""The source archive and the wheel: what is in them, and that they install where there is no nvcc."""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from helpers.missing_packages import CLI_EXTRA, advice, python_without

ROOT = Path(__file__).resolve().parents[2]
BUILT = (".so", ".o", ".pyc", ".pyd", ".a")


def files_below(folder, *endings):
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in endings and "egg-info" not in str(path)
    }


def test_sdist_has_all_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = (
        files_below("csrc", ".h", ".cuh", ".cpp", ".cu") | files_below("python", ".py") | files_below("tests", ".py")
    )
    assert len(sources) > 40
    assert not sources - names
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith(BUILT) or name.startswith("build/")]


def test_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel.path) as archive:
        names = set(archive.namelist())
    modules = {name.removeprefix("python/") for name in files_below("python/statestream", ".py")}
    native = {name for name in names if name.endswith((".so", ".pyd"))}
    info = {name for name in names if ".dist-info/" in name}
    assert names - native - info == modules
    assert [name.split(".")[0] for name in native] == ["statestream/_cpu"]


def test_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel.path) as archive:
        texts = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(texts["METADATA"]).decode()
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(texts["entry_points.txt"]).decode())
        license_text = archive.read(texts["licenses/LICENSE"]).decode()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "python/statestream/__init__.py").read_text())[1]
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert scripts["console_scripts"]["statestream"] == "statestream.__main__:main"
    assert "Apache License" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text


def requirements(wheel) -> dict[str, set[str]]:
    """What each extra brings, and under "" what comes with none: names and versions."""
    with zipfile.ZipFile(wheel.path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    found = {extra: set() for extra in ["", *metadata.get_all("Provides-Extra")]}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = line.partition(";")
        found["".join(re.findall(r'extra == ["\'](.+)["\']', marker))].add(requirement.strip())
    return found


def test_wheel_brings_torch_alone_and_its_cli_extra_what_commands_need(wheel):
    brings = requirements(wheel)
    assert brings[""] == {"torch>=2.9"}
    assert {re.split("[<=>]", line)[0] for line in brings["cli"]} == set(CLI_EXTRA)
    assert "statestream[cli]" in brings["test"]


def test_extras_that_pages_and_messages_name_are_there(wheel):
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "python").rglob("*.py")]
    named = re.findall(r'pip install "(?:\.|statestream)\[(.+?)\]"', "\n".join(map(Path.read_text, texts)))
    assert {"cli", "test"} <= {extra for extras in named for extra in extras.split(",")} <= set(requirements(wheel))


def test_build_without_nvcc_says_in_one_line_that_it_is_for_the_cpu(wheel):
    said = [line for line in wheel.said.splitlines() if line.startswith("statestream:")]
    assert said == [
        "statestream: building for the CPU alone: no nvcc in CUDA_HOME, on PATH or among the nvidia-cuda-nvcc wheels"
    ]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("1", "statestream: STATESTREAM_CUDA=1, but no nvcc in CUDA_HOME"),
        ("yes", "STATESTREAM_CUDA='yes': use auto, 0 or 1"),
    ],
)
def test_cuda_that_cannot_be_had_is_one_line_before_anything_compiles(
    checkout, bare_python, no_nvcc, tmp_path, wanted, said
):
    done = subprocess.run(
        [bare_python, "setup.py", "build_ext", "--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib"],
        cwd=checkout,
        env={**no_nvcc, "STATESTREAM_CUDA": wanted},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.o"))


def test_installed_wheel_steps_from_any_folder(installed, tmp_path):
    code = (
        "import torch, statestream\n"
        "from statestream import FusedAdam\n"
        "print(statestream.__file__)\n"
        "p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))\n"
        "p.grad = torch.full_like(p, 0.25)\n"
        "FusedAdam([p], lr=0.5, master_weights=True).step()\n"
        "assert torch.equal(p.detach(), torch.full_like(p, 0.5)), p\n"  # Adam's first step is lr, whatever the gradient
    )
    done = run_installed(installed, [sys.executable, "-c", code], tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_installed_console_script_runs(installed, tmp_path):
    (script,) = (installed / "bin").glob("statestream*")
    done = run_installed(installed, [sys.executable, script, "demo", "--help"], tmp_path)
    assert "--moments" in done.stdout


def test_installed_console_script_says_what_to_install_where_torch_came_alone(installed, tmp_path):
    (script,) = (installed / "bin").glob("statestream*")
    done = python_without(CLI_EXTRA, [script, "doctor"], tmp_path, path=installed)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"statestream: {advice('rich')}\n")


def run_installed(installed, command, cwd):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
