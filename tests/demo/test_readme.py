"""The README's snippets run and do what they are said to do, and its tables hold."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from statestream import FusedAdam
from statestream.demo.model import ByteGPT
from statestream.demo.report import print_report
from torch import nn

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SWAP_ADAMW, SWAP_TRANSFORMER_ENGINE, CHECKPOINT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def small_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def train(model, optimizer, steps, seed=0):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        model(torch.randn(32, 8, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_swap_from_adamw_trains_as_adamw_does():
    model, other = small_model(), small_model()
    names = {"model": model}
    exec(SWAP_ADAMW, names)
    assert isinstance(names["optimizer"], FusedAdam)
    train(model, names["optimizer"], 50)
    train(other, torch.optim.AdamW(other.parameters(), lr=3e-4, weight_decay=0.01), 50)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def trained_by_snippet(seed):
    names = {"model": small_model(seed, torch.bfloat16)}
    exec(SWAP_TRANSFORMER_ENGINE, names)
    train(names["model"], names["optimizer"], 3, seed)
    return names["model"], names["optimizer"]


def test_swap_from_transformer_engine_stores_what_it_asks_for():
    model, optimizer = trained_by_snippet(0)
    for param in model.parameters():
        state = optimizer.state[param]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)
        assert state["master_param"].dtype is torch.float32
    assert optimizer.state_dict_cpu_offload


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_snippet_restores_model_and_optimizer_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (model, optimizer), (new_model, new_optimizer) = trained_by_snippet(0), trained_by_snippet(1)
    exec(
        CHECKPOINT,
        {"model": model, "optimizer": optimizer, "new_model": new_model, "new_optimizer": new_optimizer},
    )
    train(model, optimizer, 2, seed=7)
    train(new_model, new_optimizer, 2, seed=7)
    for ours, theirs in zip(model.parameters(), new_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, value in optimizer.state[ours].items():
            assert torch.equal(value, new_optimizer.state[theirs][name]), name


def test_demos_table_in_the_readme_has_the_demos_rows(outcome):
    console = Console(file=StringIO(), width=80)
    parameters = sum(param.numel() for param in ByteGPT().parameters())
    settings = replace(outcome.settings, steps=150, device=torch.device("cpu"))
    export = replace(outcome.export, usual_peak_extra=None)
    print_report(console, replace(outcome, parameters=parameters, settings=settings, export=export))
    printed = console.file.getvalue().splitlines()
    shown = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert shown[0].strip() == printed[0].strip()
    labels = [[line.split("│")[1].strip() for line in text if line.startswith("│")] for text in (printed, shown)]
    assert labels[0] == labels[1]
    assert f"{parameters * 12 / 1e6:.2f} MB, all FP32" in "\n".join(shown)
