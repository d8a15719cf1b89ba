"""Which cases of the largest products run by default: a fixed sample of them. The rest run with -m long. And what makes
thousands of tests in one process quick."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from zlib import crc32

import pytest

# Read when torch is loaded, here and in every process that tests start. By itself its threads spin at the end of each
# operation until the last is there: where others use the processors too, for milliseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TESTS = Path(__file__).parent
ONE_IN = {
    "offload/test_shared_step.py": 4,
    "offload/test_forms.py": 2,
    "offload/test_bits.py": 2,
    "dcp/test_round_trip.py": 3,
    "dcp/test_inert.py": 3,
    "state_dict/test_resume.py": 2,
    "state_dict/test_export.py": 2,
    "step/test_step_edge_cases.py": 2,
    "step/test_against_double.py": 2,
    "step/test_copies.py": 3,
    "numbers/test_generic_kernel.py": 2,
    "distributed/test_transfer.py": 2,
}
FEW = 24
"""Cases of one test below which all of them run."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    products = defaultdict(list)
    for item in items:
        path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        if path in ONE_IN:
            products[path, getattr(item, "originalname", item.name)].append(item)
    for (path, _), cases in products.items():
        if len(cases) >= FEW:
            for case in cases:
                # By its name, which no other case moves, and with no period in which one argument would stay the same.
                if crc32(case.name.encode()) % ONE_IN[path]:
                    case.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        freeze()
    return result


def freeze() -> None:
    """What is there by now (imports, tests, reports) stays to the end: without it a collection of garbage, which many
    tests ask for, takes a millisecond and not half a second. No test may `gc.unfreeze()`."""
    gc.collect()
    gc.freeze()
