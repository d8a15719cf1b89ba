"""docs/errors.md: every message in it is one that is really said, and here it is brought about."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from offload.test_fake_cuda import FakeCuda
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.adam import fused_adam
from statestream.checkpoint.transfer import Loader
from statestream.device import capture
from statestream.device.host_memory import HostMemory
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from .pages import text_of

MESSAGES = re.findall(r"^### `(.+)`$", text_of("docs/errors.md"), re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def param(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(shape or (300,), dtype=dtype))
    made.grad = torch.ones_like(made)
    return made


def stepped(*shape: int, **arguments) -> FusedAdam:
    optimizer = FusedAdam([param(*shape)], **arguments)
    optimizer.step()
    return optimizer


class Unknown(torch.optim.SGD):
    pass


class Twice(FusedAdam):
    def step(self, closure=None):
        super().step()
        return super().step(closure)


def load(saved: FusedAdam, into: FusedAdam, change: Callable[[dict], object] = lambda state: None) -> None:
    state = saved.state_dict()
    change(state)
    into.load_state_dict(state)


def refuse_to_pin(address: int, nbytes: int) -> None:
    raise RuntimeError("cudaHostRegister failed with error 2")


def missing_module() -> None:
    code = "import sys; sys.modules['statestream._cpu'] = None; import statestream; statestream.FusedAdam"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    raise ImportError(done.stderr.strip().splitlines()[-1].removeprefix("ImportError: "))


def missing_matplotlib() -> None:
    code = "import statestream, torch; statestream.plan(torch.nn.Linear(2, 2)).save_png('plan.png')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['matplotlib'] = None; {code}"], capture_output=True, text=True
    )
    raise ImportError(done.stderr.strip().splitlines()[-1].removeprefix("ImportError: "))


def another_sharding(tmp_path) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from benchmarks.simulated.fake_cuda import fake_cuda_world

    with fake_cuda_world((8,)) as mesh, torch.no_grad():
        local = torch.empty(16, 4, dtype=torch.bfloat16, device="cuda:0")
        sharded = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        whole = DTensor.from_local(torch.empty(128, 4, device="cuda:0"), mesh, [Replicate()], run_check=False)
        optimizer = FusedAdam([sharded])
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"] = whole
        optimizer.load_state_dict(state)


def less_in_the_checkpoint(tmp_path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    without, with_masters = FusedAdam(model.parameters()), FusedAdam(model.parameters(), master_weights=True)
    dcp.save(get_optimizer_state_dict(model, without, options=options), checkpoint_id=tmp_path, no_dist=True)
    try:
        dcp.load(get_optimizer_state_dict(model, with_masters, options=options), checkpoint_id=tmp_path, no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise error.failures[0][0] from None


def another_kind_of_masters(tmp_path, version: int | None = None, **arguments) -> None:
    """A file with remainders, read by DCP into an optimizer with FP32 masters."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    saved = get_optimizer_state_dict(model, FusedAdam(model.parameters(), **REMAINDERS), options=options)
    if version is not None:
        saved["param_groups.weight.format_version"] = version
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    optimizer = FusedAdam(model.parameters(), **MASTERS, **arguments)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def without_state_in_a_flat_dict() -> None:
    optimizer = stepped()
    state = optimizer.state_dict()
    state["state"][0] = {name: {} for name in state["state"][0]}  # as torch hands it on
    optimizer.load_state_dict(state)


def a_lost_device(monkeypatch) -> None:
    from statestream.offload import optimizer as optimizer_module

    class Lost(FakeCuda):
        lost = False

        def __init__(self):
            super().__init__()
            self.torch_device = torch.device("cpu")

        def allocate(self, nbytes):
            return torch.empty(nbytes, dtype=torch.uint8)

        def launch(self, function, *args, **kwargs):
            super().launch(function, *args, **kwargs)
            self.lost = True  # with one piece of a parameter updated, and the others not

        def copy(self, *args):
            if self.lost:
                raise RuntimeError("the device is lost")
            super().copy(*args)

    monkeypatch.setattr(optimizer_module, "device_for", lambda _: Lost())
    optimizer = CPUOffloadOptimizer(FusedAdam([param(10_000), param(10_000)]), 3_000)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    optimizer.step()


def offloading() -> tuple[torch.nn.Parameter, CPUOffloadOptimizer]:
    made = param()
    made.grad = None
    optimizer = CPUOffloadOptimizer(FusedAdam([made]), offload_gradients=True)
    made.sum().backward()
    return made, optimizer


def a_scaler_beside_offloaded_gradients() -> None:
    scaler, (made, optimizer) = torch.amp.GradScaler("cpu"), offloading()
    scaler.scale(made.sum()).backward()
    scaler.step(optimizer)


def a_gradient_set_twice() -> None:
    made, optimizer = offloading()
    made.grad = torch.ones_like(made)
    optimizer.step()


def a_gradient_lost_on_the_way(monkeypatch) -> None:
    from statestream.offload.gradients import accumulate

    made, optimizer = offloading()
    with monkeypatch.context() as patch:
        patch.setattr(accumulate, "add_up", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            made.sum().backward()
    made.grad = None
    optimizer.step()


def a_load_that_fails_in_the_middle(monkeypatch) -> None:
    def lost(*_):
        raise RuntimeError("the device is lost")

    optimizer = stepped()
    monkeypatch.setattr(Loader, "copy", lost)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.load_state_dict(stepped().state_dict())
    optimizer.step()


def clipping_in_lightning() -> None:
    precision = pytest.importorskip("lightning.pytorch.plugins.precision", reason="lightning is not installed")
    precision.MixedPrecision("bf16-mixed", "cpu").clip_gradients(FusedAdam([param()], capturable=True), 1.0)


def a_capture(monkeypatch) -> None:
    optimizer = stepped()
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    monkeypatch.setattr(fused_adam, "is_capturing", lambda: True)
    optimizer.step()


def a_gpu_that_cannot_run(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_native", lambda *_: SimpleNamespace(why_not=lambda device: "the driver is too old"))
    kernels._cuda_for.__wrapped__(torch.device("cuda", 0))


def a_step_on_the_object() -> None:
    optimizer = FusedAdam([param()])
    optimizer.step = lambda closure=None: None
    CPUOffloadOptimizer(optimizer)


def second_of_two() -> None:
    made, optimizer = offloading()
    FusedAdam([made])
    optimizer.close()


def first_of_two() -> None:
    made, optimizer = offloading()
    second = FusedAdam([made])
    optimizer.step()
    second.step()


def a_step_of_the_optimizer_inside() -> None:
    _, optimizer = offloading()
    optimizer.inner.step()


def closed() -> None:
    _, optimizer = offloading()
    optimizer.close()
    optimizer.step()


def drop(name: str) -> Callable[[dict], object]:
    return lambda state: state["state"][0].pop(name)


def newer(state: dict) -> None:
    state["param_groups"][0]["format_version"] = 99


REMAINDERS = {"master_weights": True, "store_param_remainders": True}
MASTERS = {"master_weights": True}

CASES: list[Callable[..., object]] = [
    lambda: FusedAdam([param()], exp_avg_dtype="int64"),
    lambda: FusedAdam([param()], store_param_remainders=True),
    lambda: FusedAdam([param()], capturable=True, **REMAINDERS),
    a_capture,
    lambda: FusedAdam([param()], amsgrad=True),
    lambda: CPUOffloadOptimizer(Unknown([param()], lr=0.1)),
    lambda: CPUOffloadOptimizer(Twice([param()])),
    a_step_on_the_object,
    second_of_two,
    lambda: CPUOffloadOptimizer(torch.optim.AdamW([param(), param()]), 1000),
    lambda: HostMemory(refuse_to_pin).block(4096),
    missing_module,
    a_gpu_that_cannot_run,
    lambda: load(stepped(5, 4), stepped(4, 5)),
    another_sharding,
    lambda: load(stepped(), stepped(), drop("exp_avg_sq")),
    lambda: load(stepped(**REMAINDERS), stepped(**MASTERS)),
    lambda tmp_path: another_kind_of_masters(tmp_path, state_dict_cpu_offload=True),
    lambda tmp_path: another_kind_of_masters(tmp_path, version=1),
    without_state_in_a_flat_dict,
    lambda tmp_path: another_kind_of_masters(tmp_path),
    lambda: load(stepped(), stepped(), newer),
    less_in_the_checkpoint,
    a_lost_device,
    a_load_that_fails_in_the_middle,
    first_of_two,
    a_step_of_the_optimizer_inside,
    closed,
    a_scaler_beside_offloaded_gradients,
    a_gradient_set_twice,
    a_gradient_lost_on_the_way,
    clipping_in_lightning,
    missing_matplotlib,
]
"""One for each message, in the page's order."""


def said(message: str) -> re.Pattern:
    return re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)


@pytest.mark.parametrize(("message", "case"), list(zip(MESSAGES, CASES, strict=True)), ids=MESSAGES)
def test_the_message_is_said(message, case, request):
    wanted = case.__code__.co_varnames[: case.__code__.co_argcount]
    arguments = [request.getfixturevalue(name) for name in wanted]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case(*arguments)
        except Exception as error:
            found = [str(error)]
        else:
            found = [str(warning.message) for warning in caught]
    assert any(said(message).fullmatch(" ".join(text.split())) for text in found), found
