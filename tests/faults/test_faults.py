"""The planted faults still apply to the sources, and the tests notice them."""

from pathlib import Path

import pytest

from .judge import FEW_KERNELS, ROOT, copy_tree, judge
from .mutate import SOURCES, mutations
from .planted import PLANTED
from .source import Edit, EditError, tokens

SAMPLE = {"missing NaN rule in conversion"}

by_hand = pytest.mark.parametrize("fault", PLANTED, ids=lambda f: f.name)


def test_the_edits_that_leave_kernels_out_apply():
    text = (ROOT / FEW_KERNELS[0].path).read_text()
    for edit in FEW_KERNELS:
        text = edit.applied(text)


@by_hand
def test_fault_applies(fault):
    texts = {edit.path: (ROOT / edit.path).read_text() for edit in fault.edits}
    for edit in fault.edits:
        before = texts[edit.path]
        texts[edit.path] = edit.applied(before)
        assert [t.text for t in tokens(texts[edit.path])] != [t.text for t in tokens(before)]


def plant(fault, tree: Path):
    copy_tree(tree)
    for edit in fault.edits:
        edit.apply(tree)
    return judge(tree, {edit.path for edit in fault.edits})


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("paths", [{"csrc/adam_rule.h"}, set()], ids=["all kernels", "few kernels"])
def test_sources_without_a_fault_are_left_alone(paths, tmp_path):
    copy_tree(tmp_path)
    verdict = judge(tmp_path, paths)
    assert verdict.outcome == "survived", verdict


@pytest.mark.parametrize("fault", [f for f in PLANTED if f.name in SAMPLE], ids=lambda f: f.name)
def test_fault_is_caught(fault, tmp_path):
    verdict = plant(fault, tmp_path)
    assert verdict.outcome == "caught", verdict


@pytest.mark.long
@pytest.mark.timeout(900)
@by_hand
def test_every_fault_is_caught(fault, tmp_path):
    verdict = plant(fault, tmp_path)
    assert verdict.outcome == "caught", verdict


def test_an_edit_finds_its_place_whatever_the_formatting():
    edit = Edit("x.h", "if (a<b)  c( d );", "c(d);")
    assert (
        edit.applied("int x; // if (a < b) c(d);\nif (a <\n  b)\n  c(d);\ny") == "int x; // if (a < b) c(d);\nc(d);\ny"
    )


@pytest.mark.parametrize("text", ["if (a <= b) c(d);", "if (a < b) c(d); if (a < b) c(d);", ""])
def test_an_edit_that_does_not_apply_is_an_error(text):
    with pytest.raises(EditError):
        Edit("x.h", "if (a < b) c(d);", "").applied(text)


def test_mutations_are_many_and_the_same_for_a_seed():
    first = list(mutations(ROOT, 0))
    assert first == list(mutations(ROOT, 0))
    assert first != list(mutations(ROOT, 1))
    assert len(set(first)) == len(first) > 300
    assert {m.path for m in first} == set(SOURCES)


def test_a_mutation_changes_code_and_not_comments():
    texts = {path: (ROOT / path).read_text() for path in SOURCES}
    code = {path: [t.text for t in tokens(text)] for path, text in texts.items()}
    for mutation in list(mutations(ROOT, 0))[::5]:
        text = texts[mutation.path]
        assert text[mutation.start : mutation.end] == mutation.old
        changed = text[: mutation.start] + mutation.new + text[mutation.end :]
        assert [t.text for t in tokens(changed)] != code[mutation.path], mutation
