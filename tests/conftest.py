"""Which cases of the largest products run by default: a fixed sample of them. The rest run with -m long, and one case
of each claim with -m quick. And what makes thousands of tests in one process quick."""

from __future__ import annotations

import gc
import os
import signal
import sys
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
    "offload/test_shared_step.py": 24,
    "offload/test_owners.py": 2,
    "offload/test_lifetime.py": 2,
    "simulated_device/test_optimizers.py": 9,
    "offload/test_forms.py": 8,
    "offload/test_bits.py": 8,
    "offload/test_room_follows.py": 6,
    "offload/test_offload_gradients.py": 3,
    "offload/test_third_parties.py": 2,
    "dcp/test_round_trip.py": 3,
    "dcp/test_inert.py": 3,
    "state_dict/test_resume.py": 2,
    "state_dict/test_export.py": 2,
    "step/test_step_edge_cases.py": 2,
    "step/test_against_double.py": 2,
    "step/test_copies.py": 3,
    "muon/test_one_process.py": 2,
    "native/test_special_values.py": 2,
    "native/test_stochastic_rounding.py": 2,
    "native/test_scaled_blocks.py": 2,
    "native/test_sizes_and_isas.py": 3,
    "native/test_threads_and_cuts.py": 2,
    "ptx/test_generic.py": 2,
    "native/test_generic_kernel.py": 2,
    "distributed/test_transfer.py": 2,
}
FEW = 24
"""Cases of one test below which all of them run."""

NOT_QUICK = tuple(
    """
    build convert/test_file_memory.py::test_a_real_ctrl_c convert/test_file_memory.py::test_ctrl_c
    convert/test_folders.py::test_a_conversion_takes_the_memory convert/test_hostile cuda demo
    distributed/test_claims distributed/test_export_peak distributed/test_fake_tensors
    distributed/test_global_index.py::test_any_ranges distributed/test_host_memory distributed/test_resharding
    docs/test_planning docs/test_testing_page.py::test_the_quick
    doctor emulation fake_runtime fault_points/test_saving faults figures fuzz integrations
    memory/test_resident_peaks muon/test_on_fake_cuda muon/test_on_simulated_device muon/test_ranks
    native/test_doctor_checksums native/test_formats.py::test_the_table_needs_no_torch native/test_hostile_calls
    native/test_large_conversions
    native/test_native_threads native/test_scaled_blocks native/test_scaled_scalars native/test_scaled_training
    native/test_threads_and_cuts native/test_update_accuracy offload/test_documentation offload/test_fake_cuda
    offload/test_forked_children offload/test_long_runs offload/test_memory.py::test_a_forked_child
    offload/test_memory.py::test_host_memory_ simulated_device/test_offloaded_gradients
    simulated_device/test_optimizers streaming/test_plan.py::test_every_grain
    streaming/test_plan.py::test_no_chunk_overwrites offload/test_ranks streaming/test_share.py::test_each_grain
    offload/test_shared_step.py::test_the_gil offload/test_timeline.py::test_the_picture
    offload/test_timeline.py::test_what_cannot_be_recorded offload/test_traceback
    planner/test_command_line.py::test_a_plan_of_files_needs planner/test_command_line.py::test_a_process
    planner/test_command_line.py::test_the_picture planner/test_host_bytes planner/test_hostile.py::test_most_layers
    ptx sanitizers sass simulated_device state_dict/test_export.py::test_control_one_planted
    state_dict/test_resume.py::test_resumed_run_in_a_new step/test_interrupts.py::test_interrupts_at_random_moments
    step/test_random_rounding.py::test_two_thousand step/test_step_edge_cases.py::test_constant_tiny
    step/test_compiled step/test_threads_and_processes step/test_training_loops.py::test_a_forked_child
    step/test_written.py::test_what_is_kept_does_not_grow worlds
    """.split()  # noqa: SIM905
)
"""Rooms, files and tests that start processes or take a second: how a path below tests/ and a test's name begin."""


BY_TEST = (
    *("tests/demo/test_demo_command.py", "tests/ptx/test_generic.py"),
    "tests/simulated_device/test_optimizers.py",
)
"""Files that would take longest: each test in them may run in another process."""
TOGETHER = {
    "build": ("tests/build/test_cuda_wheel", "tests/build/test_sdist_and_wheel"),
    "ranks": (
        *("tests/offload/test_ranks", "tests/muon/test_ranks", "tests/demo/test_ranks"),
        *("tests/distributed/test_claims", "tests/distributed/test_resharding"),
    ),
}
"""Files that one process runs: they share what takes long to make, or start several processes of their own."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes share the files of tests: none where a file was asked for, which would be a start in vain."""
    asked = {Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args}
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if processors == 1 or all(path.is_file() for path in asked) else min(processors, 8)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            if path in BY_TEST:
                return nodeid.split("[")[0]
            return next((name for name, paths in TOGETHER.items() if path.startswith(paths)), path)

    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_processes(event: str, _: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise RuntimeError("a quick test starts no process; name it in NOT_QUICK of tests/conftest.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr == "quick" and collection_path.is_relative_to(TESTS):
        return collection_path.relative_to(TESTS).as_posix() in NOT_QUICK or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    # Not in the process that starts those which run the tests, nor before these have said what machine it is.
    if session.config.option.markexpr == "quick" and not session.config.option.numprocesses:
        import torch  # noqa: F401  with CUDA it starts a process to find its libraries

        sys.addaudithook(_refuse_processes)
    gc.disable()  # of what is collected nothing goes: a quarter of the time would be spent in looking for it
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    products, claims = defaultdict(list), {}
    paths = {path: _below_tests(path) for path in {item.path for item in items}}
    for item in items:
        path, name = paths[item.path], getattr(item, "originalname", item.name)
        if path in ONE_IN:
            products[path, name].append(item)
    for (path, _), cases in products.items():
        if len(cases) >= FEW:
            for case in cases:
                # By its name, which no other case moves, and with no period in which one argument would stay the same.
                if crc32(case.name.encode()) % ONE_IN[path]:
                    case.add_marker(pytest.mark.long)
    for item in items:
        path, name = paths[item.path], getattr(item, "originalname", item.name)
        if not f"{path}::{name}".startswith(NOT_QUICK) and item.get_closest_marker("long") is None:
            claim = item.nodeid.split("[")[0]
            claims[claim] = min(item, claims.get(claim, item), key=lambda case: crc32(case.name.encode()))
    for item in claims.values():
        item.add_marker(pytest.mark.quick)


def _below_tests(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


SET_BY_LIBRARIES = {
    *("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
    *("CUDA_MODULE_LOADING", "KINETO_LOG_LEVEL"),  # by the first use of a device, and by `statestream demo`
}
ENVIRON = dict(os.environ)


def ambient() -> dict[str, object]:
    """What every later test of this process sees, whoever set it."""
    import torch  # once there are tests

    return {
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES},
        "signal handlers": (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing() -> Generator[None]:
    """A file of tests leaves the process as it found it: what one leaves another fails of, in a whole run alone."""
    before = ambient()
    yield
    after = ambient()
    left = {name: after.get(name) for name in before.keys() | after if before.get(name) != after.get(name)}
    assert not left


def pytest_collection_finish() -> None:
    left = {name for name, value in os.environ.items() if ENVIRON.get(name) != value} - SET_BY_LIBRARIES
    if left:
        raise pytest.UsageError(f"a file of tests has set {sorted(left)} where it was imported")
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
