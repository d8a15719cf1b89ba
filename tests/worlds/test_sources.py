"""Nothing in the package hangs on torch's default dtype or default device: every tensor that is made says both. And it
makes no CUDA device or stream current in a way that opens contexts on others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import statestream
import torch
from torch.utils._device import _device_constructors

PACKAGE = Path(statestream.__file__).parent
NATIVE = Path(__file__).parents[2] / "csrc"

NO_DEVICE = {"frombuffer"}
"""What makes tensors on the CPU, whatever the default is."""
FACTORIES = NO_DEVICE | {function.__name__ for function in _device_constructors()}
AMBIENT = {"get_default_dtype", "get_default_device", "Tensor", "FloatTensor", "DoubleTensor", "HalfTensor"}
"""What has no other meaning than the default."""
MODULES = {"Linear", "Embedding", "LayerNorm"}


def unsaid(source: str) -> list[str]:
    """Calls that leave a dtype or a device to torch's defaults, as "line: call: what is not said"."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"{call.lineno}: {ast.unparse(call.func)}: {missing}" for call in calls if (missing := _missing(call))]


def _missing(call: ast.Call) -> str:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    root = ast.unparse(function).split(".")[0]
    said = {keyword.arg for keyword in call.keywords}
    if root == "torch" and name in AMBIENT:
        return "it is the default"
    if root == "torch" and name == "finfo" and not call.args:
        return "dtype"
    if name in ("to", "cuda") and any(
        isinstance(a, ast.Constant) and a.value == "cuda" for a in (*call.args, function)
    ):
        return "which device"
    if name == "cuda" and not call.args and not call.keywords:
        return "which device"
    if root == "torch" and name == "Generator":
        return "" if "device" in said else "device"
    if (root == "torch" and name in FACTORIES) or (root in ("torch", "nn") and name in MODULES):
        wanted = {"dtype"} if name in NO_DEVICE else {"dtype", "device"}
        return ", ".join(sorted(wanted - said))
    return ""


def test_every_tensor_of_the_package_says_dtype_and_device():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    found = {str(path.relative_to(PACKAGE)): unsaid(path.read_text(encoding="utf-8")) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_control_calls_that_make_tensors_are_read():
    """The factories that the package uses are among those that are looked for."""
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for name in ("zeros", "ones", "empty", "empty_strided", "tensor", "as_tensor", "arange", "frombuffer"):
        assert f"torch.{name}(" in text and name in FACTORIES


@pytest.mark.parametrize(
    ("planted", "missing"),
    [
        ("torch.zeros(3)", "device, dtype"),
        ("x = torch.ones(n, device=a.device)", "dtype"),
        ("torch.stack([norm, torch.tensor(float(there), dtype=torch.float32)])", "device"),
        ("torch.as_tensor(lr, dtype=torch.float32).to(device)", "device"),
        ("torch.empty(n, dtype=torch.uint8, pin_memory=True)", "device"),
        ("torch.arange(n, dtype=torch.int64)", "device"),
        ("torch.frombuffer(b)", "dtype"),
        ("torch.nn.Parameter(torch.full((3,), 0.5, device='cpu'))", "dtype"),
        ("nn.Linear(3, 4, device='cpu')", "dtype"),
        ("torch.Generator()", "device"),
        ("torch.get_default_dtype()", "it is the default"),
        ("torch.finfo().eps", "dtype"),
        ("torch.Tensor([1, 2])", "it is the default"),
        ("x.to('cuda')", "which device"),
        ("x.cuda()", "which device"),
    ],
)
def test_control_a_planted_call_is_found(planted, missing):
    (found,) = unsaid(f"def f():\n    {planted}")
    assert found.endswith(f": {missing}") and found.startswith("2: ")


@pytest.mark.parametrize(
    "right",
    [
        "torch.zeros((), dtype=torch.float32, device=device)",
        "torch.empty_like(x)",
        "value.new_empty(shape)",
        "torch.frombuffer(b, dtype=torch.uint8)",
        "torch.stack(found)",
        "x.to(device)",
    ],
)
def test_control_what_hangs_on_no_default_is_left_alone(right):
    assert unsaid(right) == []


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_control_factories_outside_the_list_take_their_dtype_from_a_tensor(default):
    """Why torch.*_like, new_* and from_numpy need no check."""
    before = torch.get_default_dtype()
    like = torch.zeros(2, dtype=torch.float16, device="cpu")
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            made = [torch.empty_like(like), torch.full_like(like, 0.5), like.new_zeros(3), like.new_tensor([0.5])]
    finally:
        torch.set_default_dtype(before)
    assert {(tensor.dtype, tensor.device.type) for tensor in made} == {(torch.float16, "cpu")}


SETTERS = ("torch.cuda.stream(", "torch.cuda.set_device(", "torch.cuda.set_stream(", "StreamContext")
"""They set a device with cudaSetDevice, which opens a context on it."""


def test_devices_and_streams_are_made_current_in_one_place_which_opens_no_context():
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    users = {path for path, text in texts.items() if any(setter in text for setter in SETTERS)}
    # The demo's ranks are processes of its own, each on its device for good.
    assert users == {"device/guards.py", "demo/ranks.py"}
    native = "".join(path.read_text(encoding="utf-8") for path in NATIVE.rglob("*.[hc]*"))
    assert native.count("cudaSetDevice(") == 1
