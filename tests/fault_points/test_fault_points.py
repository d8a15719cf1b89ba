"""Whatever fails, and wherever: the error comes out, gradients stay, every parameter and its state are as before or as
after, memory is back, and the next steps are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.bits import differences, snapshot
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, gradient, make_params, train
from statestream import CPUOffloadOptimizer, FusedAdam, kernels
from statestream.adam import state_backend
from statestream.tensors.global_index import Run, runs_of

from .points import Injected, Points, chain_of, live_bytes, points

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

FORMS = {
    "masters": Mode(None, BF16, FP32, "fp32", offload=True),
    "remainders, FP8": Mode(BF16, FP8, FP8, "remainders"),
    "FP16 masters, random bits": Mode(None, BF16, FP16, "fp16", offload=True, stochastic=True),
}


def _torchs(params: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}], lr=0.01)


def plain(form: str) -> Any:
    return build(FORMS[form]) if form in FORMS else _torchs(make_params(Mode(FP32)))


def offloaded(form: str) -> Any:
    return CPUOffloadOptimizer(plain(form), 9_000 if form in FORMS else 60_000)


@dataclass
class Case:
    """`work` of an optimizer that `make` made and that was trained for two steps; what it needs is prepared by
    `prepare`."""

    make: Callable[[str], Any]
    work: Callable[[Any, Any], Any]
    prepare: Callable[[Any], Any] = lambda optimizer: None
    forms: tuple[str, ...] = (*FORMS, "AdamW")
    repeats: bool = True
    """Whether the work, done again after it failed at a point before it had changed anything, is as if it had not."""


def _step(optimizer: Any, points_or_none: Any) -> None:
    optimizer.step()


def _other_run(optimizer: Any) -> Any:
    """A state dict of another run, in other layouts and dtypes than the state is kept in."""
    other = copy.deepcopy(optimizer)
    train(other, range(10, 13))
    state_dict = copy.deepcopy(other.state_dict())
    for index, state in state_dict["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            if index % 2:
                state[name] = state[name].double()
            elif state[name].dim() == 2:
                state[name] = state[name].t().contiguous().t()
    return state_dict


def _new_group(optimizer: Any) -> Any:
    extra = make_params(FORMS["masters"] if isinstance(optimizer, FusedAdam) else Mode(FP32), seed=9)[:2]
    return {"params": extra, "lr": torch.tensor(0.5)}


def _write(optimizer: Any) -> Any:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(1.5)


CASES = {
    "step": Case(plain, _step, forms=tuple(FORMS)),
    "step after a write": Case(plain, _step, _write, forms=tuple(FORMS)),
    "state_dict": Case(plain, lambda o, _: o.state_dict(), forms=tuple(FORMS)),
    "load_state_dict": Case(plain, lambda o, sd: o.load_state_dict(sd), _other_run, forms=tuple(FORMS)),
    "add_param_group": Case(plain, lambda o, g: o.add_param_group(g), _new_group, forms=tuple(FORMS)),
    "refresh_masters": Case(plain, lambda o, _: o.refresh_masters(), _write, forms=tuple(FORMS)),
    "wrapping": Case(plain, lambda o, _: CPUOffloadOptimizer(o, 9_000 if isinstance(o, FusedAdam) else 60_000)),
    "offloaded step": Case(offloaded, _step),
    "offloaded state_dict": Case(offloaded, lambda o, _: o.state_dict()),
    "offloaded load_state_dict": Case(offloaded, lambda o, sd: o.load_state_dict(sd), _other_run),
    "offloaded add_param_group": Case(offloaded, lambda o, g: o.add_param_group(g), _new_group),
}


class _Run:
    """An optimizer about to do the work, with gradients in place, and what it was before."""

    def __init__(self, case: Case, form: str):
        self.case = case
        self.optimizer = case.make(form)
        train(self.optimizer, range(2))
        self.given = case.prepare(self.optimizer)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, param in enumerate(self.params):
            param.grad = gradient(param, index, 2)
        self.grads = [param.grad for param in self.params]
        self.before = self.now()
        if case.prepare is _write:
            self.optimizer_before = copy.deepcopy(self.optimizer)

    def now(self) -> dict[str, Any]:
        return snapshot(self.optimizer)

    def work(self) -> Any:
        return self.case.work(self.optimizer, self.given)

    def part(self, after: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Parameters and groups that are neither wholly as before nor wholly as after; and those that are not as
        before. A master that was brought back to a written weight is as before: any step does that first."""
        now, refreshed, torn, changed = _parts(self.now()), {}, [], []
        if isinstance(getattr(self.optimizer, "inner", self.optimizer), FusedAdam) and self.case.prepare is _write:
            twin = copy.deepcopy(self.optimizer_before)
            twin.refresh_masters()
            refreshed = _parts(snapshot(twin))
        before, after = _parts(self.before), _parts(after)
        for whole, found in now.items():
            if not differences(found, before.get(whole, {})) or not differences(found, refreshed.get(whole, {})):
                continue
            changed.append(whole)
            if differences(found, after.get(whole, {})):
                torn.append(whole)
        return torn, changed


def _parts(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A snapshot by parameter, and by group for what is the group's own."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        words = name.split(" ")
        whole = " ".join(words[:4] if words[2] == "param" else words[:2])
        parts.setdefault(whole, {})[name] = value
    return parts


RUNS = [(name, form) for name, case in CASES.items() for form in case.forms]


def sampled(total: int, most: int) -> list[int]:
    return list(range(total)) if total <= most else sorted({round(i * (total - 1) / (most - 1)) for i in range(most)})


def check_points(name: str, form: str, most: int) -> None:
    case = CASES[name]
    undisturbed = _Run(case, form)
    with points() as passed:
        undisturbed.work()
    after = undisturbed.now()
    for n in sampled(len(passed.passed), most):
        check_point(case, form, n, after, passed.passed[n])


def check_point(case: Case, form: str, n: int, after: dict[str, Any], what: str) -> None:
    run = _Run(case, form)
    held = live_bytes()
    with points(n):
        came_out = _outcome(run.work)
    assert came_out in ("Injected", "done"), f"{what} came out as {came_out}"
    if came_out == "done":  # there was another way, as there is where an optimizer cannot run on the meta device
        assert differences(run.now(), after) == [], f"{what}, and another way round it"
        return
    # State that is made when it is first looked at may be there now.
    assert live_bytes() <= held + _state_bytes(run.optimizer), f"{what} left memory behind"
    assert all(p.grad is g for p, g in zip(run.params, run.grads, strict=True)), what
    torn, changed = run.part(after)
    refused = _refuses(run.optimizer)
    if refused:
        assert "load" in refused and "empty" not in what and "clone" not in what, f"{what}: {refused}"
    else:
        assert torn == [], f"{what} left parts of them changed"
    if refused and case.work is _step:  # a count that could not be written: only a load helps, and the step says so
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            run.work()
    elif refused or not changed:  # else a part is done, and doing it again is another step
        run.work()
        assert differences(run.now(), after) == [], f"{what}, then once more"


def _outcome(work: Callable[[], Any]) -> str:
    """How the work ended, in words: an error's frames would hold memory."""
    try:
        work()
    except Exception as error:
        return "Injected" if any(isinstance(e, Injected) for e in chain_of(error)) else repr(error)
    return "done"


def _state_bytes(optimizer: Any) -> int:
    return sum(
        v.nbytes for s in dict(optimizer.state.items()).values() for v in s.values() if isinstance(v, torch.Tensor)
    )


def _refuses(optimizer: Any) -> str:
    """What the optimizer says, if it says that a load left it in part."""
    inner = getattr(optimizer, "inner", optimizer)
    units = getattr(optimizer, "strategy", None)
    if units is not None and units.torn:
        return "load"
    try:
        if isinstance(inner, FusedAdam):
            inner.check_whole()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "form"), RUNS)
def test_an_error_at_points_spread_over_the_work(name, form):
    check_points(name, form, 3)


@pytest.mark.long  # two minutes
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("name", "form"), RUNS)
def test_an_error_at_every_point(name, form):
    check_points(name, form, 10**6)


def test_an_error_at_every_point_of_a_step_of_shards_that_are_several_runs(monkeypatch):
    """Whose counters are advanced before the kernel runs. A whole tensor's halves stand for a shard's runs."""

    def halves(param: torch.Tensor) -> tuple[Run, ...]:
        return tuple(
            run
            for whole in runs_of(param)
            for first, numel in ((0, whole.numel // 2), (whole.numel // 2, -(-whole.numel // 2)))
            for run in ([Run(first, numel, whole.index_map)] if numel else [])
        )

    monkeypatch.setitem(FORMS, "several runs", Mode(BF16, BF16, BF16, None, stochastic=True))
    undivided = _Run(CASES["step"], "several runs")
    undivided.work()
    monkeypatch.setattr(state_backend, "runs_of", halves)
    monkeypatch.setattr(kernels, "_EXCHANGE", None)  # as DTensors under random rounding are read one by one
    divided = _Run(CASES["step"], "several runs")
    with points() as passed:
        divided.work()
    assert sum("add_" in what for what in passed.passed) > 1, "no counters were advanced"
    assert differences(divided.now(), undivided.now()) == []
    check_points("step", "several runs", 10**6)


def test_points_are_what_they_should_be():
    """Each kind of point is passed by some work."""
    passed = set()
    for name, form in (("step", "masters"), ("load_state_dict", "masters"), ("wrapping", "remainders, FP8")):
        run = _Run(CASES[name], form)
        with points() as found:
            run.work()
        passed |= set(found.passed)
    assert {"host memory", "native adam", "native encode", "native gather"} <= passed
    assert any("empty" in what for what in passed) and any("copy_" in what for what in passed)


HOOKS = {
    "step": ("register_step_pre_hook", "register_step_post_hook"),
    "state_dict": ("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    "load_state_dict": ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
}


@pytest.mark.parametrize("make", [plain, offloaded])
@pytest.mark.parametrize("form", [*FORMS, "AdamW"])
@pytest.mark.parametrize("work", HOOKS)
def test_an_error_in_every_hook(make, form, work):
    if make is plain and form == "AdamW":
        pytest.skip("torch's own")
    case = CASES[work if make is plain else f"offloaded {work}"]
    undisturbed = _Run(case, form)
    undisturbed.work()
    after = undisturbed.now()
    for n, registration in enumerate(HOOKS[work]):
        run, hooks = _Run(case, form), Points(0)
        handle = getattr(run.optimizer, registration)(hooks.hook)
        with pytest.raises(Injected):
            run.work()
        handle.remove()
        assert differences(run.now(), after if n else run.before) == [] or work == "state_dict"
        assert all(p.grad is g for p, g in zip(run.params, run.grads, strict=True))
        if not n:
            run.work()
        assert differences(run.now(), after) == []
