"""Claims about checkpoints that several ranks saved, and one process converts for another optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from statestream.convert import convert_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from .layouts import distributed
from .runs import load, optimizer_of, start, train

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def remainders_that_ranks_saved_become_the_masters_of_their_weights(
    layout: str, model_layout: str, folder: Path
) -> None:
    """The weights are saved in pieces of their own, so that each is gathered for the pieces of its remainders."""
    model, optimizer = start(layout, "bf16 + remainders")
    train(model, optimizer, 0, 3)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    other = distributed(model_layout, torch.bfloat16)
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    saved, converted = (folder / f"{layout}-{model_layout}-{form}".replace(" ", "_") for form in ("low", "fp32"))
    state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    dcp.save(state, checkpoint_id=saved)
    if dist.get_rank() == 0:
        convert_checkpoint(saved, converted, "statestream", masters="float32", part_bytes=1000)
        before, after = (
            dcp.FileSystemReader(where).read_metadata().state_dict_metadata for where in (saved, converted)
        )
        for key, entry in before.items():
            if key.startswith("optim.state.") and not key.endswith(("step", "master_param")):
                assert sorted(map(str, entry.chunks)) == sorted(map(str, after[key].chunks)), key
    dist.barrier()
    whole_model, whole = start(layout, "bf16 + masters", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")
    train(whole_model, whole, 0, 3)
    new_model = distributed(layout, torch.bfloat16, seed=1)
    new = optimizer_of(new_model, "bf16 + masters", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")
    load("flat", new_model, new, converted)
    for a, b in zip(whole_model.parameters(), new_model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "master_param", "step"):
            x, y = whole.state[a][name], new.state[b][name]
            if name != "step":
                x, y = x.to_local(), y.to_local()
            assert x.dtype is y.dtype and torch.equal(x, y), name
