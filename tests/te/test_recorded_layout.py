"""What FusedAdam exports has the keys and dtypes that Transformer Engine's holds, by the record in layout.json."""

import pytest
import torch
from helpers.engine import LAYOUT, arguments_of
from statestream import FusedAdam
from statestream.convert import convert_state_dict

each_mode = pytest.mark.parametrize("mode", LAYOUT["modes"], ids=lambda mode: f"{mode['param']},{mode['arguments']}")


def trained(mode):
    params = [torch.nn.Parameter(torch.randn(5, 3).to(getattr(torch, mode["param"]))) for _ in range(2)]
    optimizer = FusedAdam(params, lr=0.1, use_decoupled_grad=True, **arguments_of(mode))
    for param in params:
        param.decoupled_grad = torch.ones(5, 3)
    optimizer.step()
    return params, optimizer


@each_mode
def test_an_export_has_the_peers_keys_and_dtypes_and_a_count_of_its_own(mode):
    params, optimizer = trained(mode)
    own_master = params[0].dtype is torch.float32  # which FusedAdam keeps no second one of
    wanted = {k: getattr(torch, v) for k, v in mode["state"].items() if not (own_master and k == "master_param")}
    for state in optimizer.state_dict()["state"].values():
        assert {name: value.dtype for name, value in state.items()} == {**wanted, "step": torch.float32}


@each_mode
def test_converted_it_has_exactly_the_peers_keys_and_dtypes(mode):
    params, optimizer = trained(mode)
    masters = "float32" if mode["state"].get("master_param") == "float32" else None
    converted = convert_state_dict(optimizer.state_dict(), "transformer_engine", masters=masters, weights=params)
    for state in converted["state"].values():
        assert {name: str(value.dtype) for name, value in state.items()} == {
            name: f"torch.{dtype}" for name, dtype in mode["state"].items()
        }
    for group in converted["param_groups"]:
        assert set(group) == set(LAYOUT["group after a step"])
        assert type(group["step"]) is int and group["step"] == 1
