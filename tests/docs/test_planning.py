"""docs/planning.md runs as it stands: its Python in order, its commands each, and those of the README."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
import torch.distributed.checkpoint as dcp
from planner.files import PUBLISHED, write_json
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from .pages import snippets, text_of

PAGE = text_of("docs/planning.md")
COMMANDS = [line for snippet in snippets(PAGE, "sh") for line in snippet.splitlines()]
COMMANDS += [
    line
    for snippet in snippets(text_of("README.md"), "sh")
    for line in snippet.splitlines()
    if line.startswith("statestream ")
]


@pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")
def test_the_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in snippets(PAGE, "python"):
        exec(compile(snippet, "docs/planning.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "2,099,712 parameters" in printed and "Span(what=" in printed and "last export" in printed
    for picture in ("plan.png", "step.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(command, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "config.json", PUBLISHED["llama 3 8B"][1])
    if "checkpoint-adamw" in line:
        model = torch.nn.Linear(8, 8)
        adamw = torch.optim.AdamW(model.parameters())
        dcp.save(get_optimizer_state_dict(model, adamw), checkpoint_id=tmp_path / "checkpoint-adamw", no_dist=True)
    program, *args = shlex.split(line)
    ran = command(*args)
    assert program == "statestream" and ran.err == "" and ran.out
    assert ran.status == 0 or args[0] == "doctor"
    if "--json" in args:
        assert json.loads(ran.out)["ranks"] == 16
