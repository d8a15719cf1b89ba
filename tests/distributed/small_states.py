"""Claims about states in blocks with scales: on as many ranks, cut the same way, no bit is lost over a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .runs import load, save, start, train


def a_run_of_small_states_resumes_bit_equal_on_as_many_ranks(layout: str, mode: str, folder: Path) -> None:
    model, optimizer = start(layout, mode)
    train(model, optimizer, 0, 3)
    for way in ("flat", "nested"):
        where = folder / f"small-{layout}-{mode}-{way}".replace(" ", "_")
        save(way, model, optimizer, where)
        new_model, new = start(layout, mode, seed=1)
        train(new_model, new, 7, 1)
        load(way, new_model, new, where)
        old_model, old = model, optimizer
        if way == "nested":  # which goes on
            train(old_model, old, 3, 2)
            train(new_model, new, 3, 2)
        for (name, a), b in zip(old_model.named_parameters(), new_model.parameters(), strict=True):
            _check(f"{name}, {way}", a, b)
            for key in ("exp_avg", "exp_avg_sq", *(["master_param"] if "master_param" in old.state[a] else [])):
                assert old.state[a][key].dtype is new.state[b][key].dtype
                _check(f"{key} of {name}, {way}", old.get_unscaled_state(a, key), new.get_unscaled_state(b, key))
            assert old.state[a]["step"].item() == new.state[b]["step"].item()


def _check(what: str, a: Tensor | nn.Parameter, b: Tensor | nn.Parameter) -> None:
    x, y = (t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in (a, b))
    assert x.dtype is y.dtype and torch.equal(x, y), (what, x, y)
