"""Beside Transformer Engine's own FusedAdam, where it is installed and there is a GPU for it: it runs on no other."""

from importlib.util import find_spec

import pytest
import torch
from helpers.engine import LAYOUT, arguments_of
from statestream import FusedAdam
from statestream.convert import convert_state_dict

if find_spec("transformer_engine") is None:
    pytest.skip("transformer-engine is not installed", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("transformer-engine needs a CUDA GPU", allow_module_level=True)
te = pytest.importorskip("transformer_engine.pytorch")
engine = pytest.importorskip("transformer_engine.pytorch.optimizers")

STEPS = 5
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
each_mode = pytest.mark.parametrize("mode", LAYOUT["modes"], ids=lambda mode: f"{mode['param']},{mode['arguments']}")
TOLERANCE = {"float32": 1e-6, "bfloat16": 0.02, "float16": 0.02}
"""The peer keeps one scale a tensor where FusedAdam keeps one a block, and rounds another way."""


def start(mode):
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, mode["param"])
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in ((33, 7), (5,))]


def train(optimizer, params, steps):
    for step in steps:
        for i, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + i)
            param.decoupled_grad = torch.randn(param.shape, generator=generator).to("cuda", param.dtype)
        optimizer.step()


def pair(mode):
    ours, theirs = start(mode), start(mode)
    arguments = {**SETTINGS, **arguments_of(mode), "use_decoupled_grad": True}
    return (ours, FusedAdam(ours, **arguments)), (theirs, engine.FusedAdam(theirs, **arguments))


@each_mode
def test_the_record_is_what_the_peer_holds(mode):
    _, (params, optimizer) = pair(mode)
    assert [set(group) for group in optimizer.state_dict()["param_groups"]] == [set(LAYOUT["group"])]
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()
    assert [set(group) for group in saved["param_groups"]] == [set(LAYOUT["group after a step"])]
    for state in saved["state"].values():
        found = {name: str(value.dtype).removeprefix("torch.") for name, value in state.items()}
        assert found == mode["state"]


@each_mode
def test_five_steps_are_the_peers(mode):
    (ours, optimizer), (theirs, reference) = pair(mode)
    train(optimizer, ours, range(STEPS))
    train(reference, theirs, range(STEPS))
    tolerance = TOLERANCE[mode["param"]]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@each_mode
def test_a_run_goes_on_in_the_peer_and_comes_back(mode):
    (ours, optimizer), (theirs, reference) = pair(mode)
    train(optimizer, ours, range(STEPS))
    with torch.no_grad():
        for source, target in zip(ours, theirs, strict=True):
            target.copy_(source)
    masters = "float32" if mode["state"].get("master_param") == "float32" else None
    there = convert_state_dict(optimizer.state_dict(), "transformer_engine", masters=masters, weights=ours)
    reference.load_state_dict(there)
    for source, target in zip(ours, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.get_unscaled_state(source, name),
                reference.get_unscaled_state(target, name).float(),
                rtol=0.05,
                atol=1e-4,
            )
    train(reference, theirs, range(STEPS, 2 * STEPS))
    back = convert_state_dict(reference.state_dict(), "statestream", weights=theirs)
    with torch.no_grad():
        for source, target in zip(theirs, ours, strict=True):
            target.copy_(source)
    optimizer.load_state_dict(back)
    assert [optimizer.state[param]["step"].item() for param in ours] == [2 * STEPS] * len(ours)


def test_a_quantised_parameter_trains_as_the_peers_does():
    def layer():
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=True):
            return te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")

    ours, theirs = layer(), layer()
    optimizer = FusedAdam(ours.parameters(), **SETTINGS, master_weights=True, use_decoupled_grad=True)
    reference = engine.FusedAdam(theirs.parameters(), **SETTINGS, master_weights=True, use_decoupled_grad=True)
    for o, model in ((optimizer, ours), (reference, theirs)):
        train(o, list(model.parameters()), range(STEPS))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.get_unscaled_state(a, "master_param"),
            reference.get_unscaled_state(b, "master_param"),
            rtol=1e-5,
            atol=1e-6,
        )
