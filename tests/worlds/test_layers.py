"""The package's modules import downwards: no room one above it, no module one that imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import statestream

PACKAGE = Path(statestream.__file__).parent
LAYERS = """
    formats interrupts text_table extras dcp_metadata
    optimizer_hooks tensors arguments device memory kernels state checkpoint adam streaming offload
    planner convert doctor demo cli __main__
""".split()  # noqa: SIM905
"""Modules and rooms at the top of the package, each with what it may import before it."""
USERS_VIEW = {"demo/training.py", "doctor/checks.py"}
"""What imports `statestream` itself, as a user does. That one loads the rest when it is asked for."""


def imports(source: str, modules: set[str]) -> Iterator[str]:
    """The modules that a source imports at any time, but for those of its annotations alone."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def graph(package: Path) -> dict[str, set[str]]:
    paths = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(imports(path.read_text(), set(paths))) for name, path in paths.items()}


def wrong(found: dict[str, set[str]]) -> list[str]:
    """Imports that run up, and circles."""
    views = {"statestream." + path.removesuffix(".py").replace("/", ".") for path in USERS_VIEW}
    found = {name: others - ({"statestream"} if name in views else set()) for name, others in found.items()}
    layer = {name: LAYERS.index(name.split(".")[1]) for name in found if name != "statestream"}
    faults = [
        f"{name} imports {other}"
        for name, others in found.items()
        for other in sorted(others)
        if other == "statestream" or (name != "statestream" and layer[other] > layer[name])
    ]
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        faults.append(f"circle: {' -> '.join(error.args[1])}")
    return faults


def test_imports_run_down_and_never_round():
    found = graph(PACKAGE)
    assert len(found) > 90 and sum(map(len, found.values())) > 300
    assert wrong(found) == []
    assert found["statestream"] == set(), "it loads the rest when it is asked for"


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("statestream.tensors.local", "statestream.adam.fused_adam"),
        ("statestream.streaming.plan", "statestream.offload.optimizer"),
        ("statestream.tensors.sharding", "statestream.tensors.global_index"),
        ("statestream.kernels.abi", "statestream"),
    ],
)
def test_control_an_import_that_runs_up_or_round_is_seen(module, other):
    found = graph(PACKAGE)
    found[module] = {*found[module], other}
    assert any(module in fault for fault in wrong(found))
