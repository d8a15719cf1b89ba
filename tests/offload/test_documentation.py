"""docs/offload.md: its snippets run in order, and its lists are those of the code."""

import re
from pathlib import Path

import torch
from statestream import CPUOffloadOptimizer
from statestream.offload.checks import ELEMENTWISE
from statestream.streaming.plan import MOST_CHUNKS, PHASES

TEXT = (Path(__file__).parents[2] / "docs" / "offload.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/offload.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert int(re.fullmatch(r"(\d+) chunks", printed[0])[1]) > 10
    assert printed[1] == "1.0 of the state is stepped on the host"
    resumed, saved = names["resumed"], names["saved"]
    assert isinstance(resumed, CPUOffloadOptimizer)
    for index, p in enumerate(names["model"].parameters()):
        assert set(resumed.state[p]) == set(saved["state"][index])
        for key, value in saved["state"][index].items():
            assert torch.equal(resumed.state[p][key].to(value.dtype), value), key


def test_the_known_optimizers_are_listed():
    line = next(line for line in TEXT.splitlines() if line.startswith("| elementwise, known"))
    listed = re.findall(r"`(\w+)`", line.split("of `torch.optim`")[0])
    assert {getattr(torch.optim, name) for name in listed} == ELEMENTWISE


def test_the_largest_ring_is_as_it_says():
    assert "three times a thirty-second" in TEXT and (PHASES, MOST_CHUNKS) == (3, 32)


def test_the_figure_is_there():
    for path in re.findall(r"\]\((\.\./[^)]+|\w+\.md)\)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / path).exists(), path
