"""Every snippet is run by some test, links lead somewhere, the README stays short."""

from __future__ import annotations

import re

import pytest

from .pages import PAGES, ROOT, snippets, text_of

RUN_BY = {
    "README.md": "tests/demo/test_readme.py",
    "docs/checkpoints.md": "tests/distributed/claims.py",
    "docs/muon.md": "tests/muon/mixed.py",
    "docs/offload.md": "tests/offload/test_documentation.py",
    "docs/planning.md": "tests/docs/test_planning.py",
    "docs/trainers.md": "tests/integrations/test_documentation.py",
}
"""The test that runs a page's Python."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_python_has_a_test_that_runs_it(page):
    text = text_of(page)
    fenced = re.findall(r"^```(\w*)$", text, re.MULTILINE)[::2]
    assert set(fenced) <= {"python", "sh", "text"}, "a fence of another language would be run by no test"
    if "python" not in fenced:
        assert page not in RUN_BY
        return
    runner = (ROOT / RUN_BY[page]).read_text(encoding="utf-8")
    assert PAGES[page].name in runner and "exec(" in runner


OTHERS = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "CHANGELOG.md", *(ROOT / "tests").rglob("README.md")])
"""Pages beside what they are of."""


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links_within_the_repository_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" not in link:
            assert ((ROOT / page).parent / link).exists(), link


def test_every_page_can_be_reached_from_the_readme():
    seen, left = set(), ["README.md"]
    while left:
        page = left.pop()
        if page in seen or page not in PAGES:
            continue
        seen.add(page)
        folder = PAGES[page].parent
        links = [link for link in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", text_of(page)) if "://" not in link]
        left += [str((folder / link).resolve().relative_to(ROOT)) for link in links]
    assert seen == set(PAGES)


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) < 250


def test_a_planted_snippet_is_found():
    assert snippets("a\n```python\nx = 1\n```\n```sh\nls\n```\n", "python") == ["x = 1\n"]
