"""Masters are compared with the weights beside them: whoever converts is told how many do not round to theirs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.command_line import command
from statestream import FusedAdam
from statestream.convert import agreement, convert_checkpoint, convert_file, convert_state_dict, fp32_weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

__all__ = ["command"]

STALE = 41


def checkpoint(stale=STALE, flat=True, dtype=torch.bfloat16, **options):
    """Weights and state of a trained model, of whose second layer so many weights were written afterwards."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 20, bias=False).to(dtype) for _ in range(2)))
    optimizer = FusedAdam(
        model.named_parameters(), lr=1e-2, **{"master_weights": True, "state_dict_cpu_offload": True, **options}
    )
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    optimizer.step()
    model.zero_grad()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    weights = {name: weight.clone() for name, weight in weights.items()}
    weights["1.weight"].view(-1)[:stale] += 1.0
    weights["1.weight"].view(-1)[0] = float("nan")
    return weights, state


def in_a_folder(tmp_path, weights, state, **options):
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "from")
    convert_checkpoint(tmp_path / "from", tmp_path / "to", **options)


def in_a_file(tmp_path, weights, state, **options):
    torch.save({"model": weights, "optim": state}, tmp_path / "from.pt")
    convert_file(tmp_path / "from.pt", tmp_path / "to.pt", **options)


def in_memory(tmp_path, weights, state, to, masters=None):
    if masters == "weights":
        list(fp32_weights(state, weights))
    else:
        convert_state_dict(state, to, weights=weights)


WAYS = (in_a_folder, in_a_file, in_memory)
TARGETS = ({"to": "torch", "masters": "weights"}, {"to": "statestream"}, {"to": "transformer_engine"})


def said(way, tmp_path, weights, state, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        way(tmp_path, weights, state, **options)
    return [str(w.message) for w in found if w.category is RuntimeWarning]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("options", TARGETS, ids=lambda options: options["to"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_masters_that_do_not_round_to_their_weights_are_counted_once(way, options, flat, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "_SLICE", 100)
    (message,) = said(way, tmp_path, *checkpoint(flat=flat), **options)
    assert message.startswith(
        f"{STALE} of 1,200 masters do not round to their weights; of 1 parameters, '1.weight' for"
    )


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: options["to"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"dtype": torch.float16},
        {"master_weight_dtype": "fp16"},
        {"store_param_remainders": True},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_masters_as_a_step_leaves_them_are_passed_over_in_silence(form, way, options, tmp_path):
    weights, state = checkpoint(stale=0, **form)
    weights["1.weight"].view(-1)[0] = weights["1.weight"].view(-1)[1]  # not the NaN
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        value = state.get(f"state.1.weight.{key}")
        if value is not None:
            value.view(-1)[0] = value.view(-1)[1]
    assert said(way, tmp_path, weights, state, **options) == []


def test_not_a_number_in_both_is_no_difference(tmp_path):
    weights, state = checkpoint(stale=0)
    state["state.1.weight.master_param"].view(-1)[0] = float("nan")
    assert said(in_memory, tmp_path, weights, state, to="statestream") == []


def test_the_command_says_it_in_a_line(command, tmp_path):
    weights, state = checkpoint()
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "from")
    ran = command("convert", tmp_path / "from", tmp_path / "to", "--to", "torch", "--masters", "weights")
    assert ran.status == 0
    assert f"warning: {STALE} of 1,200 masters do not round to their weights" in ran.err
