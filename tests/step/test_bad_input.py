"""Bad input is one error that names it, and the optimizer works on as if nothing had been asked."""

import math
from itertools import product

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.training import train
from statestream import CPUOffloadOptimizer, FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32


def params(n=3):
    return [torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(i))) for i in range(n)]


NAN = math.nan
BAD_ARGUMENTS = {
    "an unknown dtype string": ({"exp_avg_dtype": "torch.bfloat61"}, ValueError, "exp_avg_dtype.*bfloat61"),
    "a string that is no dtype": ({"exp_avg_sq_dtype": "nn"}, ValueError, "exp_avg_sq_dtype.*nn"),
    "a private name": ({"exp_avg_sq_dtype": "__name__"}, ValueError, "exp_avg_sq_dtype"),
    "a dtype of integers": ({"exp_avg_dtype": torch.int32}, ValueError, "exp_avg_dtype.*int32"),
    "float64 moments": ({"exp_avg_sq_dtype": torch.float64}, ValueError, "exp_avg_sq_dtype.*float64"),
    "no dtype": ({"exp_avg_dtype": None}, ValueError, "exp_avg_dtype.*None"),
    "bfloat16 masters": ({"master_weights": True, "master_weight_dtype": BF16}, ValueError, "master_weight_dtype"),
    "remainders without masters": (
        {"store_param_remainders": True},
        ValueError,
        "store_param_remainders.*master_weights",
    ),
    "remainders with capturable": (
        {"store_param_remainders": True, "master_weights": True, "capturable": True},
        RuntimeError,
        "capturable.*store_param_remainders",
    ),
    "remainders of float16 masters": (
        {"store_param_remainders": True, "master_weights": True, "master_weight_dtype": torch.float16},
        ValueError,
        "store_param_remainders=True .* master_weight_dtype=torch.float16",
    ),
    "FP8 of another kind": ({"exp_avg_dtype": torch.float8_e5m2}, ValueError, "exp_avg_dtype.*float8_e5m2"),
    "random rounding of exact moments": (
        {"stochastic_rounding": ["exp_avg"]},
        ValueError,
        "stochastic_rounding: 'exp_avg' .*stored as torch.float32",
    ),
    "random rounding of parameters with masters": (
        {"stochastic_rounding": ["param"], "master_weights": True},
        ValueError,
        "stochastic_rounding: 'param' .*a master keeps.*master_weights=False",
    ),
    "random rounding of parameters with remainders": (
        {"stochastic_rounding": ("param",), "master_weights": True, "store_param_remainders": True},
        ValueError,
        "stochastic_rounding: 'param' .*remainders keep",
    ),
    "random rounding of something else": ({"stochastic_rounding": ["grad"]}, ValueError, "stochastic_rounding: 'grad'"),
    "random rounding as a string": ({"stochastic_rounding": "param"}, ValueError, "stochastic_rounding: 'param'.*list"),
    "random rounding as a number": ({"stochastic_rounding": 1}, ValueError, "stochastic_rounding: 1 "),
    "a negative seed": ({"seed": -1}, ValueError, "seed: -1"),
    "a seed of more than 64 bits": ({"seed": 2**64}, ValueError, "seed: 18446744073709551616"),
    "a seed that is no integer": ({"seed": 0.5}, ValueError, "seed: 0.5"),
    "NaN lr": ({"lr": NAN}, ValueError, "lr.*nan"),
    "negative lr": ({"lr": -1.0}, ValueError, "lr.*-1"),
    "infinite lr": ({"lr": math.inf}, ValueError, "lr.*inf"),
    "NaN tensor lr": ({"lr": torch.tensor(NAN)}, ValueError, "lr.*nan"),
    "lr of several elements": ({"lr": torch.ones(2)}, ValueError, "lr"),
    "lr of no elements": ({"lr": torch.ones(0)}, ValueError, "lr"),
    "text for lr": ({"lr": "fast"}, ValueError, "lr.*fast"),
    "no lr": ({"lr": None}, ValueError, "lr.*None"),
    "NaN betas": ({"betas": (0.9, NAN)}, ValueError, "betas.*nan"),
    "a NaN first beta": ({"betas": (NAN, 0.9)}, ValueError, "betas.*nan"),
    "a beta of 1": ({"betas": (0.9, 1.0)}, ValueError, "betas.*1.0"),
    "a negative beta": ({"betas": (-0.1, 0.9)}, ValueError, "betas.*-0.1"),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, ValueError, "betas"),
    "one number for betas": ({"betas": 0.9}, ValueError, "betas.*0.9"),
    "text in betas": ({"betas": ("a", 0.9)}, ValueError, "betas"),
    "NaN eps": ({"eps": NAN}, ValueError, "eps.*nan"),
    "negative eps": ({"eps": -1e-8}, ValueError, "eps.*-1e-08"),
    "NaN weight decay": ({"weight_decay": NAN}, ValueError, "weight_decay.*nan"),
    "negative weight decay": ({"weight_decay": -0.1}, ValueError, "weight_decay.*-0.1"),
    "AMSGrad": ({"amsgrad": True}, RuntimeError, "amsgrad.*AMSGrad"),
    "no staging": ({"export_staging_bytes": 0}, ValueError, "export_staging_bytes.*0"),
    "negative staging": ({"export_staging_bytes": -5}, ValueError, "export_staging_bytes.*-5"),
    "text for staging": ({"export_staging_bytes": "much"}, ValueError, "export_staging_bytes.*much"),
    "no number for staging": ({"export_staging_bytes": None}, ValueError, "export_staging_bytes.*None"),
    "an argument that is not there": ({"momentum": 0.9}, TypeError, "momentum"),
}


@pytest.mark.parametrize("bad", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_error_that_names_it(bad):
    arguments, error, named = BAD_ARGUMENTS[bad]
    with pytest.raises(error, match=named):
        FusedAdam(params(), **arguments)


def test_float16_parameters_are_not_rounded_by_random_bits_and_say_so_when_asked():
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    half.grad = torch.zeros(3, dtype=torch.float16)
    optimizer = FusedAdam([*params(), half], stochastic_rounding=["param"])
    with pytest.raises(ValueError, match="parameter 3 of group 0: float16 parameters are rounded to nearest"):
        optimizer.step()
    FusedAdam([*params(), half], stochastic_rounding=True).step()  # of all that is rounded so


def bad_groups():
    p = params(1)[0]
    return {
        "a NaN lr": ({"params": [p], "lr": NAN}, ValueError, "lr of group 1.*nan"),
        "NaN betas": ({"params": [p], "betas": (0.9, NAN)}, ValueError, "betas of group 1.*nan"),
        "AMSGrad": ({"params": [p], "amsgrad": True}, RuntimeError, "amsgrad of group 1"),
        "a bad count": ({"params": [p], "step": "x"}, ValueError, "step of group 1.*x"),
        "no parameters": ({"lr": 0.1}, KeyError, "params"),
        "no tensor": ({"params": [3]}, TypeError, "int"),
        "a set": ({"params": {p}}, TypeError, "set"),
        "a differentiable step": ({"params": [p], "differentiable": True}, RuntimeError, "differentiable of group 1"),
        "no leaf": ({"params": [p * 2]}, ValueError, "non-leaf"),
        "names for some": ({"params": [("a", p), params(1)[0]]}, ValueError, "names"),
        "names where there are none": ({"params": [("a", p)]}, ValueError, "names"),
        "no dict": ([p], TypeError, "dict"),
    }


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", bad_groups())
def test_a_refused_group_leaves_no_trace(bad, capturable):
    group, error, named = bad_groups()[bad]
    members = params()
    optimizer, undisturbed = (FusedAdam(p, lr=0.1, capturable=capturable) for p in (members, params()))
    given = dict(group) if isinstance(group, dict) else list(group)
    train(optimizer, range(2))
    train(undisturbed, range(2))
    before = snapshot(optimizer)
    with pytest.raises(error, match=named):
        optimizer.add_param_group(group)
    if isinstance(group, dict):
        assert set(group) == set(given) and all(group[key] is given[key] for key in given), (
            "the caller's dict was changed"
        )
    assert len(optimizer.param_groups) == 1
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, range(2, 4))
    train(undisturbed, range(2, 4))
    assert differences(snapshot(optimizer), snapshot(undisturbed)) == []
    assert len(optimizer.state_dict()["state"]) == 3


def test_a_parameter_of_another_group_is_refused_and_one_listed_twice_is_warned_of():
    a, b = params(2)
    optimizer = FusedAdam([a])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [b, a]})
    assert len(optimizer.param_groups) == 1
    with pytest.warns(UserWarning, match="duplicate"):
        twice = FusedAdam([b, b], lr=0.1)
    alone = FusedAdam(params(2)[1:], lr=0.1)
    train(twice, range(2))
    train(alone, range(2))
    # The run's gradient of a parameter that comes twice is the second's.
    assert twice.state[b]["step"].item() == 2


def test_a_tensor_for_parameters_and_no_parameters_are_errors_as_in_torch():
    with pytest.raises(TypeError, match="iterable"):
        FusedAdam(torch.zeros(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])


# ---- gradients ----


def sparse_gradient(param):
    param.grad = torch.ones(4).to_sparse()


def wide_gradient(param):
    param.decoupled_grad = torch.ones(4, dtype=torch.float64)


def tiny_gradient(param):
    param.decoupled_grad = torch.ones(4).to(torch.float8_e4m3fn)


def short_gradient(param):
    param.decoupled_grad = torch.ones(3)


def flat_gradient(param):
    param.decoupled_grad = torch.ones(4, 1)


def far_gradient(param):
    param.decoupled_grad = torch.ones(4, device="meta")


BAD_GRADIENTS = {
    sparse_gradient: (RuntimeError, "sparse"),
    wide_gradient: (ValueError, "float64"),
    tiny_gradient: (ValueError, "float8_e4m3fn"),
    short_gradient: (ValueError, r"\(3,\).*\(4,\)"),
    flat_gradient: (ValueError, r"\(4, 1\).*\(4,\)"),
    far_gradient: (ValueError, "meta"),
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("named_parameters", [False, True])
@pytest.mark.parametrize("give", BAD_GRADIENTS, ids=lambda g: g.__name__)
def test_a_bad_gradient_is_refused_before_any_parameter_moves(give, named_parameters, capturable):
    error, named = BAD_GRADIENTS[give]
    decoupled = give is not sparse_gradient

    def build():
        groups = [[(f"layer.{i}", p) for i, p in enumerate(params())][:2], [("last", params()[2])]]
        if not named_parameters:
            groups = [[p for _, p in group] for group in groups]
        return FusedAdam([{"params": g} for g in groups], lr=0.1, use_decoupled_grad=decoupled, capturable=capturable)

    def step(optimizer, numbers):
        for number in numbers:
            for i, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
                grad = torch.full((4,), float(number + i + 1))
                setattr(param, "decoupled_grad" if decoupled else "grad", grad)
            optimizer.step()

    optimizer, undisturbed = build(), build()
    step(optimizer, [0])
    step(undisturbed, [0])
    before = snapshot(optimizer)
    give(optimizer.param_groups[1]["params"][0])
    where = "'last'" if named_parameters else "parameter 0 of group 1"
    with pytest.raises(error, match=f"{where}.*{named}"):
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    step(optimizer, [1])
    step(undisturbed, [1])
    assert differences(snapshot(optimizer), snapshot(undisturbed)) == []


def test_wrapper_subclasses_are_refused_by_name():
    from torch.testing._internal.two_tensor import TwoTensor

    param = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    param.grad = TwoTensor(torch.ones(3), torch.ones(3))
    optimizer = FusedAdam([param])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*TwoTensor"):
        optimizer.step()
    plain = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([plain], use_decoupled_grad=True)
    plain.decoupled_grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*TwoTensor"):
        optimizer.step()
    assert torch.all(plain == 1)


def test_an_unknown_argument_of_step_is_named():
    optimizer = FusedAdam(params())
    with pytest.raises(TypeError, match="scale"):
        optimizer.step(scale=2.0)


def test_set_scaled_state_refuses_what_does_not_fit():
    (param,) = params(1)
    optimizer = FusedAdam([param], exp_avg_dtype=BF16)
    for name, value, named in (
        ("momentum", torch.zeros(4), "momentum"),
        ("step", torch.zeros(()), "step"),
        ("exp_avg", torch.zeros(5), r"exp_avg.*\(4,\).*\(5,\)"),
        ("exp_avg", torch.zeros(4, dtype=BF16), "exp_avg.*float32.*bfloat16"),
    ):
        with pytest.raises(ValueError, match=named):
            optimizer.set_scaled_state(param, name, value)
    assert not optimizer.state[param]["exp_avg"].any()


@pytest.mark.parametrize("threads", ["many", "-2", "0", "1.5"])
def test_a_bad_number_of_threads_is_named(threads, monkeypatch):
    optimizer = FusedAdam(params(), lr=0.1)
    before = snapshot(optimizer)
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", threads)
    with pytest.raises(ValueError, match=f"STATESTREAM_NUM_THREADS.*{threads}"):
        train(optimizer, range(1))
    monkeypatch.delenv("STATESTREAM_NUM_THREADS")
    after = snapshot(optimizer)
    assert [name for name in differences(before, after) if name in before] == []
    assert all(state["step"].item() == 0 for state in optimizer.state.values())


OVER = {
    "plain": lambda optimizer: optimizer,
    "streamed": lambda optimizer: CPUOffloadOptimizer(optimizer, 3000),
    "on the host": lambda optimizer: CPUOffloadOptimizer(optimizer, 3000, cpu_fraction=1),
}


@pytest.mark.parametrize(
    ("what", "over"),
    [
        *product(["parameter 1 of group 0", "gradient of parameter 1"], OVER),
        ("exp_avg of parameter 1", "plain"),  # elsewhere it is a view of a block that others share
    ],
)
@pytest.mark.parametrize("masters", [False, True])
def test_memory_that_was_freed_under_a_tensor_is_an_error_that_names_it(what, masters, over):
    params = [torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = OVER[over](FusedAdam(params, lr=0.1, master_weights=masters))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    freed = {"p": params[1], "g": params[1].grad, "e": optimizer.state[params[1]]["exp_avg"]}[what[0]]
    freed.untyped_storage().resize_(0)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=rf"{what}.*: (600|1200) bytes are wanted .* its memory has 0"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("found", [None, 0.5, [1.0]], ids=repr)
def test_a_state_that_is_no_tensor_is_an_error_that_names_it(found, over):
    params = [torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = OVER[over](FusedAdam(params, lr=0.1, master_weights=True))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[params[1]]["exp_avg"] = found
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=rf"exp_avg .*expected a tensor, found {type(found).__name__}"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["step"] == 1
