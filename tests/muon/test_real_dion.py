"""dion's own Muon, where it is installed: whichever layout it has, one process. It is not on the package index."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
dion = pytest.importorskip("dion", reason="dion is not installed (github.com/microsoft/dion)")

from statestream.offload.muon_layouts import BatchedMuon, muon_layout  # noqa: E402

from .cases import ADAMW, EMPTY, EXPERTS, LAYOUTS, LION, ODD, Case, Group, differences, offloaded, train  # noqa: E402


@pytest.mark.parametrize("budget", [None, 1, 300_000])
def test_bits_are_those_of_dion(budget, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "dion", dion.Muon)
    case = Case("dion", [Group(ODD), EMPTY, EXPERTS, ADAMW, LION])
    assert isinstance(muon_layout(case.run().optimizer), BatchedMuon)
    assert differences(train(offloaded(case.run(), budget)), train(case.run())) == []
