"""What a user keeps in optimizer.state[param] beside Adam's state: saved and loaded as it is, as torch does, and never
looked at by a step."""

import copy
import pickle

import pytest
import torch
from helpers.bits import same_bits
from helpers.modes import BF16, FP8, FP16, FP32
from statestream import CPUOffloadOptimizer, FusedAdam

FORMS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "master_weights": True},
    "scaled": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16},
}

TENSORS = {
    "integers": torch.arange(5),
    "booleans": torch.tensor([True, False]),
    "doubles": torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "complex": torch.tensor([1 + 2j]),
    "bfloat16": torch.full((7,), 1.5, dtype=BF16),
    "float16 as scaled states are": torch.full((300,), 0.25, dtype=FP16),
    "bytes as scaled states are": torch.arange(200, dtype=torch.uint8),
    "int16 as remainders are": torch.arange(6, dtype=torch.int16),
    "every second element": torch.arange(8)[::2],
    "one element in every place": torch.ones(1).expand(4),
    "rows with gaps": torch.arange(12.0).view(3, 4)[:, :2],
    "empty": torch.empty(0, 3),
    "sparse": torch.eye(3).to_sparse(),
}
OTHERS = {"a number": 3, "text": "warm", "a list": [1, 2]}
OPTIMIZERS = ["live", "snapshot", "offloaded"]


def build(kind, form="bf16", before=None):
    """A stepped optimizer with the parameter's state, and `before` in it from before it was offloaded."""
    param = torch.nn.Parameter(torch.ones(300, dtype=BF16))
    optimizer = FusedAdam([param], state_dict_cpu_offload=kind == "snapshot", **FORMS[form])
    step(param, optimizer)
    optimizer.state[param].update(before or {})
    if kind == "offloaded":
        optimizer = CPUOffloadOptimizer(optimizer, 4096)
    return param, optimizer


def step(param, optimizer):
    param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    param.grad = None


def equal(found, wanted):
    if not isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted) and found == wanted
    if wanted.layout is not torch.strided:
        return found.layout is wanted.layout and equal(found.to_dense(), wanted.to_dense())
    return found.dtype is wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("what", [*TENSORS, *OTHERS])
def test_it_is_in_the_state_dict_as_it_is_and_stays_through_a_step(what, kind, when):
    value = {**TENSORS, **OTHERS}[what]
    param, optimizer = build(kind, before={"mine": value} if when == "before" else None)
    if when == "later":
        optimizer.state[param]["mine"] = value
    step(param, optimizer)
    saved = optimizer.state_dict()["state"][0]
    assert equal(saved["mine"], value)
    assert optimizer.state[param]["mine"] is value
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq", "master_param", "mine"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_changes_no_bit_of_a_run(kind, form):
    plain, one = build(kind, form)
    param, other = build(kind, form, before={"mine": torch.arange(5)})
    for each, optimizer in ((plain, one), (param, other)):
        step(each, optimizer)
    assert same_bits(plain, param)
    for name, value in one.state[plain].items():
        assert same_bits(value, other.state[param][name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("what", [*TENSORS, *OTHERS])
def test_it_is_loaded_where_the_optimizer_has_it_too(what, kind):
    value = {**TENSORS, **OTHERS}[what]
    _, optimizer = build(kind, before={"mine": value})
    param, resumed = build(kind, before={"mine": None})
    saved = optimizer.state_dict()
    resumed.load_state_dict(saved)
    found = resumed.state[param]["mine"]
    assert equal(found, value)
    assert found is not saved["state"][0]["mine"] or what in ("a number", "text")
    step(param, resumed)
    assert equal(resumed.state_dict()["state"][0]["mine"], value)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_where_the_optimizer_has_no_such_key_it_is_refused_by_name_and_nothing_changes(kind):
    _, optimizer = build(kind, before={"mine": torch.arange(5)})
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"] + 1
    param, resumed = build(kind)
    before = copy.deepcopy(dict(resumed.state[param]))
    with pytest.raises(ValueError, match=r"parameter 0: the state dict has 'mine'.* put such a key into"):
        resumed.load_state_dict(saved)
    assert all(same_bits(value, before[name]) for name, value in resumed.state[param].items())


def test_a_snapshot_is_apart_from_it():
    param, optimizer = build("snapshot")
    optimizer.state[param]["mine"], optimizer.state[param]["list"] = torch.zeros(8)[::2], [0]
    saved = optimizer.state_dict()["state"][0]
    optimizer.state[param]["mine"].add_(1)
    optimizer.state[param]["list"].append(1)
    assert saved["mine"].tolist() == [0.0] * 4 and saved["list"] == [0]


@pytest.mark.parametrize("name", ["get_unscaled_state", "set_scaled_state"])
def test_it_is_no_state_to_be_read_or_written_as_adams(name):
    param, optimizer = build("live", before={"mine": torch.arange(5)})
    arguments = (param, "mine", torch.zeros(5))[: 3 if name.startswith("set") else 2]
    with pytest.raises(ValueError, match="'mine' is not a state of this parameter; it has exp_avg, exp_avg_sq"):
        getattr(optimizer, name)(*arguments)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_in_copies(kind):
    param, optimizer = build(kind, before={"mine": torch.arange(5)})
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other = twin.param_groups[0]["params"][0]
        assert other is not param
        assert torch.equal(twin.state[other]["mine"], torch.arange(5))
        assert twin.state[other]["mine"] is not optimizer.state[param]["mine"]


def test_a_parameter_that_grows_in_host_memory_keeps_it():
    param, optimizer = build("offloaded", before={"mine": torch.arange(5)})
    with torch.no_grad():
        param.data = param.data.float()  # its master is gone, and its state moves to another bank
    step(param, optimizer)
    assert "master_param" not in optimizer.state[param] and optimizer.state[param]["exp_avg"].dtype is BF16
    assert torch.equal(optimizer.state[param]["mine"], torch.arange(5))
    assert optimizer.state[param]["exp_avg_sq"].dtype is FP32


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("count", [5, 5.0, torch.tensor(5), torch.tensor(5.0, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_count_that_was_put_there_by_hand_is_where_the_next_step_goes_on(kind, count, when):
    """In a wrapped optimizer `before` or `after` it was wrapped."""
    param, optimizer = build(kind, before={"step": copy.deepcopy(count)} if when == "before" else None)
    _, reference = build("live")
    reference.state[reference.param_groups[0]["params"][0]]["step"].fill_(5)
    if when == "after":
        optimizer.state[param]["step"] = copy.deepcopy(count)
        optimizer.memory_report()
        assert optimizer.state_dict()["state"][0]["step"] == 5
    step(param, optimizer)
    step(reference.param_groups[0]["params"][0], reference)
    assert optimizer.state[param]["step"].dtype is FP32 and optimizer.state[param]["step"].item() == 6
    assert same_bits(param, reference.param_groups[0]["params"][0])


@pytest.mark.parametrize("count", [-1, 2.5, "five", None, [5]], ids=repr)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_no_count_is_refused_and_nothing_changes(kind, count):
    param, optimizer = build(kind)
    optimizer.state[param]["step"] = count
    before = param.detach().clone(), optimizer.state[param]["exp_avg"].clone()
    for refused in (lambda: step(param, optimizer), optimizer.state_dict):
        with pytest.raises(ValueError, match=r"step in the state of a parameter.*not a count of steps"):
            refused()
    assert same_bits(param.detach(), before[0]) and same_bits(optimizer.state[param]["exp_avg"], before[1])
    assert optimizer.state[param]["step"] == count


@pytest.mark.parametrize(
    "own", [{"step": 5}, {"step": torch.tensor(5.0), "exp_avg": torch.ones(2)}], ids=["n", "tensors"]
)
def test_what_is_kept_under_a_name_of_its_own_counts_no_parameters_steps(own):
    """Transformer Engine's dicts count by group, where no parameter counts for itself."""
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(5)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0]["step"]
    saved["param_groups"][0]["step"] = 3
    saved["state"]["mine"] = own
    fresh = torch.nn.Parameter(torch.ones(5))
    loaded = FusedAdam([fresh])
    loaded.load_state_dict(saved)
    assert loaded.state[fresh]["step"] == 3 and loaded.state["mine"] is not None
