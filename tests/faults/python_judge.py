"""Asks the tests about a change of the package's Python code: first the file that docs/contributing.md names for the
changed source, then the rest of that file's room, then every other room."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from .judge import ROOT, Verdict, named

__all__ = ["PACKAGE", "RUNGS", "SOON", "asked_first", "first_files", "judge_python", "python_sources", "rungs_of"]

PACKAGE = "python/statestream/"

RUNGS = {"first": "the file that is asked first", "room": "the rest of its room", "rest": "other rooms"}
SOON = 10
"""Seconds of a processor in which the first file should have noticed."""
_CPU_SECONDS = {"first": 150, "room": 600, "rest": 1800}
"""Of the process that runs a rung's tests: a fault may make a loop endless."""
_SECONDS = 3600

_OF_TIME = ("not_slow", "in_a_few_seconds", "under_90_seconds")
"""In names of tests that others' use of the processors may fail."""

_OTHER_ROOMS = (
    *("step", "state_dict", "offload", "simulated_device", "distributed", "dcp", "muon", "planner", "convert"),
    *("memory", "hostile", "fault_points", "fuzz", "te", "doctor", "demo", "native", "integrations", "figures"),
    "docs",
)
"""Those that see Python code, in the order in which they are asked."""

_SHOWN = re.compile(r"demo/|doctor/|cli|command|figure|table\.py|__main__|/__init__")
"""Sources that are no part of training, saving or planning: their random mistakes would be of colours and words."""


def asked_first(page: str) -> list[tuple[str, str]]:
    """(source, test) of each row of docs/contributing.md that says what is asked first; paths from the root."""
    found = []
    for line in page.splitlines():
        row = re.fullmatch(r"\| ((?:`statestream[\w.]*`(?:, )?)+) \| `([\w/]+\.py)` \|", line)
        modules = re.findall(r"`statestream\.?([\w.]*)`", row[1]) if row else ()
        found += [(_source(module), f"tests/{row[2]}") for module in modules]
    return found


def _source(module: str) -> str:
    path = PACKAGE + module.replace(".", "/")
    return f"{path.rstrip('/')}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def _table() -> dict[str, str]:
    return dict(asked_first((ROOT / "docs" / "contributing.md").read_text()))


def python_sources() -> list[str]:
    """Files that are changed at random."""
    return [path for path in sorted(_table()) if not _SHOWN.search(path.removeprefix(PACKAGE))]


def first_files(paths: Iterable[str]) -> dict[str, list[str]]:
    """The files that are asked first about any of these sources, as one rung."""
    table = _table()
    return {"first": sorted({table[path] for path in paths})}


def rungs_of(path: str, until: str = "rest") -> dict[str, list[str]]:
    """What is asked about a source, one rung after the other, the last of them `until`."""
    first = _table()[path]
    room = first.split("/")[1]
    others = [f"tests/{other}" for other in _OTHER_ROOMS if other != room]
    rungs = zip(RUNGS, ([first], [f"tests/{room}", f"--ignore={first}"], others), strict=True)
    return dict(list(rungs)[: list(RUNGS).index(until) + 1])


def judge_python(tree: Path, rungs: dict[str, list[str]]) -> Verdict:
    """The first test that notices what was changed in the tree, its rung, and the processor seconds that this took; of
    what survived the last rung."""
    rung, seconds = "", 0.0
    for rung, asked in rungs.items():
        before = _used()
        status, words = _run(tree, asked, _CPU_SECONDS[rung])
        seconds = _used() - before
        if status == 4:
            raise RuntimeError(f"no tests ran: {words[-2000:]}")
        if status not in (0, 5):  # 5: the first file is all of its room
            return Verdict("caught", named(words, status), seconds, rung)
    return Verdict("survived", "", seconds, rung)


def _run(tree: Path, asked: list[str], cpu_seconds: int) -> tuple[int, str]:
    """pytest's exit status, negative for a signal that ended it, and its output. In a fork of this process, which has
    loaded what tests load, and started no thread: most of a run is the loading."""
    if "statestream" in sys.modules:
        raise RuntimeError("this process has loaded statestream, and so its forks would not load the changed one")
    os.environ["OMP_WAIT_POLICY"] = "passive"  # as tests/conftest.py says
    import hypothesis  # noqa: F401
    import pytest
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    (tree / "tmp").mkdir(exist_ok=True)
    said = tree / "tmp" / "said"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.chdir(tree)
            os.environ.update(PYTHONPATH=str(tree / "python"), TMPDIR=str(tree / "tmp"), PYTHONDONTWRITEBYTECODE="1")
            sys.dont_write_bytecode = True
            sys.path[:] = [str(tree / "python"), *(path for path in sys.path if Path(path).resolve() != ROOT)]
            options = ["-x", "-v", "-n0", "-p", "no:cacheprovider", "--assert=plain", "--timeout=200"]
            os._exit(pytest.main([*options, "-k", f"not ({' or '.join(_OF_TIME)})", *asked]))
        finally:
            os._exit(70)
    ended, end = (0, 0), time.monotonic() + _SECONDS
    try:
        while not ended[0] and time.monotonic() < end:
            time.sleep(0.05)
            ended = os.waitpid(child, os.WNOHANG)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # or what it left behind
    status = os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(child, 0))[1])
    return status, said.read_text(errors="replace")


def _used() -> float:
    """Processor seconds of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
