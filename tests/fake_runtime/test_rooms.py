"""The GPU tests of every room, on a CUDA runtime in host memory under torch's real front end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_runtime import build, runtime

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "kernels": ["tests/cuda"],
    "offload": [
        *("tests/offload/test_on_gpu.py", "tests/offload/test_gpu_lifetime.py"),
        "tests/distributed/test_pinned.py",
    ],
    "the runtime itself": ["tests/fake_runtime/on_it"],
}
"""What runs in one process."""

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=build.why_not() or "")


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, subprocess.Popen]]:
    """All at once."""
    yield from _started([])


def _started(options: list[str]) -> Iterator[dict[str, subprocess.Popen]]:
    built = build.build()
    command = [sys.executable, "-m", "tests.fake_runtime", "-m", "pytest", "-p", "tests.fake_runtime.plugin"]
    command += ["-q", "-n0", "-p", "no:cacheprovider", *options]
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for name, paths in ROOMS.items():
            with open(Path(folder) / name, "w") as output:
                processes[name] = subprocess.Popen(
                    [*command, *paths],
                    cwd=ROOT,
                    env=runtime.environment(built.runtime, built.module),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            processes[name].output = Path(folder) / name
        try:
            yield processes
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def _finish(process: subprocess.Popen) -> None:
    status = process.wait()
    output = process.output.read_text()
    print(output)
    assert status == 0, output


@pytest.mark.parametrize("name", ROOMS)
def test_gpu_tests_pass_on_the_runtime(running, name):
    _finish(running[name])


def test_the_day_on_a_gpu_runs_whole(tmp_path):
    """With little of everything: no line of it may fail for the first time on a machine that is lent for an hour."""
    built = build.build()
    command = [sys.executable, "-m", "tests.fake_runtime", "-m", "benchmarks.gpu_day", "--tiny"]
    environment = {**runtime.environment(built.runtime, built.module), "STATESTREAM_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.stem for path in tmp_path.glob("*.md")}
    assert written == {"gpu_step", "offload_step", "gpu_day"}
    text = (tmp_path / "gpu_day.md").read_text()
    for what in ("copies up and down", "export to the host", "streamed step", "weights up", "commit"):
        assert what in text


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_all_gpu_tests_pass_on_the_runtime():
    for processes in _started(["-m", ""]):
        for process in processes.values():
            _finish(process)
