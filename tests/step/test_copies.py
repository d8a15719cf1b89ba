"""Copies of an optimizer, by deepcopy, pickle and torch.save, go on by themselves."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import FORMS
from helpers.training import build, train
from statestream import FusedAdam
from torch.optim import lr_scheduler

BF16, FP32 = torch.bfloat16, torch.float32


def params(n=2, dtype=FP32):
    return [torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(i)).to(dtype)) for i in range(n)]


def copies():
    def through_pickle(optimizer):
        return pickle.loads(pickle.dumps(optimizer))

    def through_torch_save(optimizer):
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return [copy.deepcopy, through_pickle, through_torch_save]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("duplicate", copies(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_copy_goes_on_alone_and_bit_equal(form, duplicate, scheduled):
    optimizer = build(form)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda e: 1.0) if scheduled else None
    train(optimizer, range(2))
    twin = duplicate(optimizer)
    assert type(twin) is FusedAdam
    before = snapshot(optimizer)
    assert differences(before, snapshot(twin)) == []
    train(twin, range(2, 4))
    assert differences(before, snapshot(optimizer)) == [], "stepping the copy moved the original"
    train(optimizer, range(2, 4))
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    assert scheduler is None or scheduler.optimizer is optimizer
    twin.add_param_group({"params": params(1, form.param_dtypes[0])})
    train(twin, range(4, 5))
    assert len(twin.state_dict()["state"]) == len(optimizer.state_dict()["state"]) + 1


def test_a_copy_together_with_its_model_stays_with_it():
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    train(optimizer, range(1))
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.param_groups[0]["params"][0] is twin_model.weight
    train(twin, range(1, 2))
    assert not torch.equal(twin_model.weight, model.weight)


def test_an_optimizer_is_freed_with_its_model():
    (param,) = params(1)
    optimizer = FusedAdam([param], master_weights=True)
    train(optimizer, range(1))
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
