"""The demo's instruments: if these could not see, its verdict would mean nothing."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from statestream.demo import controls
from statestream.demo.compare import Difference, differences
from statestream.demo.data import Corpus
from statestream.demo.figures import draw_loss, draw_memory
from statestream.demo.memory import peak_extra_bytes
from statestream.demo.model import CONTEXT, ByteGPT
from statestream.demo.report import print_report

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus():
    return Corpus()


# ---- text ----


def test_batches_depend_on_seed_and_step_alone(corpus):
    text, following = corpus.batch(seed=1, step=17, size=4, length=CONTEXT)
    again, _ = Corpus().batch(seed=1, step=17, size=4, length=CONTEXT)
    assert text.shape == following.shape == (4, CONTEXT)
    assert torch.equal(text, again)
    assert torch.equal(text[:, 1:], following[:, :-1])
    for seed, step in ((1, 18), (2, 17), (11, 7)):
        assert not torch.equal(text, corpus.batch(seed, step, 4, CONTEXT)[0])


def test_text_is_the_standard_librarys_own_source(corpus):
    text = bytes(corpus.text.tolist())
    assert len(text) == 4 * 2**20
    assert b"import os" in text
    assert text.decode("utf-8", errors="replace").count("\ufffd") < len(text) / 1000


def test_text_comes_from_no_tests_and_no_installed_packages(tmp_path):
    for folder in ("test", "site-packages", "pkg/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "no.py").write_text("X" * 100_000)
    (tmp_path / "pkg" / "yes.py").write_text("y" * 70_000)
    (tmp_path / "no.txt").write_text("X" * 100_000)
    assert bytes(Corpus(tmp_path).text.tolist()) == b"y" * 70_000


def test_no_text_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds 0 bytes"):
        Corpus(tmp_path)


# ---- model ----


def test_model_has_one_to_three_million_parameters():
    model = ByteGPT()
    assert 1e6 < sum(param.numel() for param in model.parameters()) < 3e6
    assert model(torch.zeros(2, CONTEXT, dtype=torch.long)).shape == (2, CONTEXT, 256)


def test_model_does_not_see_the_byte_it_predicts():
    model = ByteGPT()
    text = torch.randint(256, (1, CONTEXT))
    changed = text.clone()
    changed[0, 60:] = (changed[0, 60:] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :60], after[0, :60])
    assert not torch.equal(before[0, 60:], after[0, 60:])


# ---- memory ----


def test_peak_counts_what_is_kept_and_what_is_passing():
    def work():
        kept = torch.empty(1_000_000, dtype=torch.float32)
        for _ in range(3):
            torch.empty(2_000_000, dtype=torch.float32).fill_(1)  # one at a time
        return kept

    kept, peak = peak_extra_bytes(CPU, work)
    assert kept.numel() == 1_000_000
    assert peak == 12_000_000


def test_peak_counts_a_temporary_inside_an_operator():
    # LAPACK factors a copy of the matrix, beside the result; no Python object ever holds the copy.
    x = torch.rand(500, 500)
    result, peak = peak_extra_bytes(CPU, lambda: torch.linalg.inv(x))
    assert peak >= 2 * result.nbytes


def test_peak_is_zero_where_nothing_is_allocated():
    x = torch.rand(100)
    assert peak_extra_bytes(CPU, lambda: x.mul_(x))[1] == 0


# ---- comparison ----


def test_differences_are_of_bits():
    nan = torch.tensor([float("nan"), 1.0])
    assert differences({"weights": {"w": nan}}, {"weights": {"w": nan.clone()}}) == []
    zero, minus = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert differences({"m": {"w": zero}}, {"m": {"w": minus}}) == [Difference("m", "w", 1, 2)]
    bf16 = torch.ones(3, 5, dtype=torch.bfloat16)
    other = bf16.clone()
    other.view(torch.int16)[1, 2] ^= 1
    assert differences({"m": {"w": bf16}}, {"m": {"w": other}}) == [Difference("m", "w", 1, 15)]


@pytest.mark.parametrize(
    "other",
    [{}, {"m": {}}, {"m": {"v": torch.ones(3)}}, {"m": {"w": torch.ones(4)}}, {"m": {"w": torch.ones(3).bfloat16()}}],
    ids=["kind", "name", "other name", "shape", "dtype"],
)
def test_what_is_missing_or_of_another_form_differs(other):
    ours = {"m": {"w": torch.ones(3)}}
    assert differences(ours, other)
    assert differences(other, ours)


# ---- controls ----


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flipped_bit_is_one_bit_of_one_tensor_in_the_file(tmp_path):
    torch.manual_seed(0)
    saved = {"a": {"exp_avg": torch.randn(7, 9), "exp_avg_sq": torch.rand(7, 9)}, "b": torch.randn(5)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    controls.flip_saved_bit(tmp_path, "a.exp_avg")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    assert [len(data) for data in before.values()] == [len(data) for data in after.values()]
    loaded = {"a": {"exp_avg": torch.zeros(7, 9), "exp_avg_sq": torch.zeros(7, 9)}, "b": torch.zeros(5)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    changed = loaded["a"]["exp_avg"].view(torch.int32) ^ saved["a"]["exp_avg"].view(torch.int32)
    assert changed.count_nonzero() == 1
    assert changed.sum() == 1 << 21
    assert torch.equal(loaded["a"]["exp_avg_sq"], saved["a"]["exp_avg_sq"])
    assert torch.equal(loaded["b"], saved["b"])


# ---- report ----


def printed(outcome):
    console = Console(file=StringIO(), width=100)
    print_report(console, outcome)
    return console.file.getvalue()


def test_report_on_a_gpu_has_the_bounded_and_the_usual_export(outcome, tmp_path):
    text = printed(outcome)
    for words in ("5.5000", "2.5000", "8.00 (", "12.00 (", "12.00 MB", "1.05 MB", "8.00 MB", "equal bit for bit"):
        assert words in text, words
    draw_loss(outcome, tmp_path / "loss.png")
    draw_memory(outcome, tmp_path / "memory.png")


def test_report_shows_few_of_many_differences(outcome):
    found = [Difference("exp_avg", f"layer {i}", i + 1, 100) for i in range(40)]
    text = printed(replace(outcome, at_the_end=found))
    assert "DIFFERENT" in text
    assert "exp_avg of layer 0: 1 of 100 elements" in text
    assert "and 34 more tensors" in text
    assert len(text.splitlines()) < 25


def test_nothing_compared_is_not_equal(outcome):
    empty = replace(outcome, compared=0)
    assert not empty.equal
    assert "nothing was compared" in printed(empty)
