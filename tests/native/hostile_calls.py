"""python hostile_calls.py MODULE SEED COUNT: every argument of every function of a native module spoilt, then, so many
times, a few at once.

Run by test_hostile_calls in a process of its own, for a crash would end it. First each function is called as it
should be. Then each call must be refused before anything of it is run, which a RuntimeError would not be, and touch no
byte of the tensors that it was given. Prints how many were refused; every call, before it is made, where
STATESTREAM_HOSTILE_VERBOSE is set.
"""

from __future__ import annotations

import datetime
import importlib
import os
import random
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from statestream import kernels
from torch.distributed.tensor import DTensor

FORMATS = (kernels.BFLOAT16, kernels.BFLOAT16, kernels.SCALED_FLOAT8, kernels.SCALED_FLOAT16, kernels.FLOAT32)
NUMEL = 300
"""More than one block of scales, and no multiple of it."""

NOT_NUMBERS: list[Any] = [None, "1", b"1", [], {}, object(), 1j, torch.zeros(2)]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 0.5, float("nan"), 2**64, -(2**63) - 1]
NOT_ADDRESSES: list[Any] = [*NOT_INTEGERS, -1]
BAD_COUNTS: list[Any] = [*NOT_INTEGERS, -1, -(2**63), 2**63 - 1, 2**62]
BAD_CODES: list[Any] = [*NOT_INTEGERS, -1, 7, 99, 2**31 - 1, -(2**31), 2**31, 2**32 + 1]


class Tensors:
    """One parameter and all its state, at rest: what a refused call must not change."""

    def __init__(self) -> None:
        self.param = torch.ones(NUMEL, dtype=torch.bfloat16)
        self.grad = torch.full_like(self.param, 2)
        self.exp_avg = torch.zeros(NUMEL, dtype=torch.uint8)
        self.exp_avg_sq = torch.ones(NUMEL, dtype=torch.float16)
        self.master = torch.ones(NUMEL)
        self.step = torch.tensor(3.0)
        self.scales = torch.ones(2)
        self.before = [tensor.clone() for tensor in self.all()]

    def all(self) -> list[torch.Tensor]:
        return [self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master, self.step, self.scales]

    def rows(self) -> array:
        words = kernels.row(self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master, self.step)
        return array("q", words)

    def extras(self) -> array:
        scale = self.scales.data_ptr()
        return array("q", (scale, scale, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0))

    def untouched(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.all(), self.before, strict=True))


def spoilt_table(words: array, broken: dict[int, list[int]]) -> Iterator[Any]:
    """Buffers of another length, kind, order or place, and ones of which a word cannot be (`broken`, by its place)."""
    yield from (None, 5, "rows", list(words), words[:-1], words[:1], words + words[:3])
    yield from (array("i", [0] * 2 * len(words)), array("d", [0.0] * len(words)), array("b", [0] * 8 * len(words)))
    numbers = np.array(words)
    yield from (numbers[::-1], numbers[::2], numbers.reshape(1, -1), numbers.reshape(-1, 1), numbers.astype(">i8"))
    yield from (np.int64(5), np.array(5), np.array([None] * len(words)), numbers.astype(np.complex64))
    raw = bytearray(8 * len(words) + 1)
    raw[1:] = words.tobytes()
    yield np.frombuffer(raw, np.int64, offset=1)  # at an odd address
    released = memoryview(words)
    released.release()
    yield released
    for place, values in broken.items():
        for value in values:
            spoilt = array("q", words)
            spoilt[place] = value
            yield spoilt


def spoilt_formats(codes: list[Any]) -> Iterator[Any]:
    yield from (None, 5, "formats", list(FORMATS), (), FORMATS[:4], (*FORMATS, 0))
    for place in range(5):
        for code in codes:
            yield (*FORMATS[:place], code, *FORMATS[place + 1 :])


def arguments(module: Any, tensors: Tensors) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of each function: arguments that are right, and of each of them values that are not."""
    cuda = module.__name__.endswith("_cuda")
    place = {"device": 0, "stream": 0} if cuda else {"threads": 2}
    bad_place = (
        {"device": NOT_INTEGERS, "stream": NOT_ADDRESSES} if cuda else {"threads": [*NOT_INTEGERS, 0, -1, 4097, 2**31]}
    )
    rows = tensors.rows()
    addresses = {word: [0, int(rows[word]) + 1] for word in range(1, 7) if word != 3}  # a byte is always aligned
    lengths = [-1, -(2**63), 2**63 - 1, 2**62, 2**57]
    extras = tensors.extras()
    scales = {word: [0, int(extras[word]) + 2, -4] for word in (0, 1)}
    indices = {3: [-1, 2**32], 4: [-256, 100, 2**63 - 256], 5: [0, -1], 6: [0, -(2**63)]}
    numbers = dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"), 0.5)
    flags = dict.fromkeys(("decoupled", "bias_correction", "maximize", "advance"), True)
    adam = {
        "rows": rows,
        "formats": FORMATS,
        **numbers,
        **flags,
        **place,
        "extras": extras,
        "seed": 1,
        "stochastic": 3,
    }
    bad_adam = {
        "rows": list(spoilt_table(rows, {0: lengths, 3: [0], **addresses})),
        "formats": list(spoilt_formats(BAD_CODES)),
        **{name: [v for v in NOT_NUMBERS if not isinstance(v, torch.Tensor)] for name in numbers},
        **{name: [[], "True", object()] for name in flags},
        **bad_place,
        "extras": list(spoilt_table(extras, {**scales, **indices})),
        "seed": NOT_ADDRESSES,
        "stochastic": [*NOT_INTEGERS, -1, 4, 8, 2**31 - 1],
    }
    n = {"n": NUMEL, **place}
    bad_n = {"n": BAD_COUNTS, **bad_place}
    fp8, fp32, scale = tensors.exp_avg.data_ptr(), tensors.master.data_ptr(), tensors.scales.data_ptr()
    of_fp32 = [*NOT_ADDRESSES, 0, fp32 + 1, fp32 + 2, 2**64 - 4]
    of_scales = [*NOT_ADDRESSES, 0, scale + 2, 2**64 - 4]
    of_codes = [*BAD_CODES, kernels.NONE, kernels.REMAINDER]
    of_fp8 = [*NOT_ADDRESSES, 0, 2**64 - 1]
    coded = {"format": kernels.SCALED_FLOAT8, "scale": scale}
    bad_coded = {"format": of_codes, "scale": of_scales, "root": [[], "", object()]}
    found = {
        "adam": (adam, bad_adam),
        "decode": ({**coded, "source": fp8, "destination": fp32, **n},
                   {**bad_coded, "source": of_fp8, "destination": of_fp32, **bad_n}),
        "encode": ({**coded, "source": fp32, "destination": fp8, **n},
                   {**bad_coded, "source": of_fp32, "destination": of_fp8, **bad_n}),
        "refresh_master": (
            {"weight": tensors.param.data_ptr(), "master": fp32, **n},
            {"weight": [*NOT_ADDRESSES, 0, tensors.param.data_ptr() + 1], "master": of_fp32, **bad_n,
             "param_format": of_codes, "master_format": of_codes},
        ),
        "has_adam": ({"formats": FORMATS}, {"formats": list(spoilt_formats(NOT_INTEGERS))}),
    }  # fmt: skip
    if cuda:
        counters = array("q", [tensors.step.data_ptr()])
        odd = [array("q", [address]) for address in (0, counters[0] + 1, counters[0] + 2)]
        other = [None, 5, list(counters), array("i", [0, 0]), array("d", [0.0]), np.zeros((1, 1), np.int64)]
        found["advance_steps"] = (
            {"counters": counters, **place},
            {"counters": odd + other, "found_inf_address": [*NOT_ADDRESSES, 3], **bad_place},
        )
        found["why_not"] = ({"device": 0}, {"device": NOT_INTEGERS})
        adam["capturable"] = True
        adam["scratch_address"] = tensors.master.data_ptr()
        bad_adam["capturable"] = [[], "", object()]
        for name in ("lr_address", "grad_scale_address", "found_inf_address", "scratch_address"):
            bad_adam[name] = [*NOT_ADDRESSES, 2, 2**64 - 2]
        bad_adam["scratch_address"].append(0)
    else:
        found["use_isa"] = ({"name": module.isa()}, {"name": ["", "mmx", None, 5, b"\xff", "\x00", "a" * 100_000]})
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # not in torch 2.9
            found["gather"] = gather_arguments()
    return found


def gather_arguments() -> tuple[dict[str, Any], dict[str, Any]]:
    class WithGrad:
        grad = 5

    exchange = torch.Tensor.__dlpack_c_exchange_api__
    good = {
        "exchange": exchange,
        "params": [WithGrad()],
        "grad_name": "grad",
        "states": defaultdict(dict),
        "plain_types": (torch.Tensor,),
        "sharded_type": DTensor,
        "scales": {},
        "exp_avg": 1,
        "exp_avg_sq": 1,
        "masters": {1: 0, 2: 1, 4: 1},
        "step_on_device": False,
        "extras": True,
        "first_ordinal": 0,
    }
    bad = {
        "exchange": [None, 5, exchange.__class__, datetime.datetime_CAPI],
        "params": [None, (), {}, "params", 5],
        "grad_name": [None, 5, b"grad"],
        "states": [None, 5, []],
        "plain_types": [None, 5, [torch.Tensor]],
        "sharded_type": [5, "DTensor", torch.zeros(1)],
        "scales": [None, 5, []],
        **dict.fromkeys(("exp_avg", "exp_avg_sq"), NOT_INTEGERS),
        "masters": [None, 5, [], *({code: 1} for code in (-1, 0, 3, 5, 7, 99, 2**31)), *({2: v} for v in NOT_INTEGERS)],
        "step_on_device": [[], "", object()],
        "extras": [[], "", object()],
        "first_ordinal": NOT_INTEGERS,
    }
    return good, bad


def spoilt_calls(module: Any, tensors: Tensors) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One argument at a time; one left out; one too many."""
    for name, (good, bad) in arguments(module, tensors).items():
        function = getattr(module, name)
        for argument, values in bad.items():
            for value in values:
                shown = f"{name}({argument}={repr(value)[:60]})"
                yield shown, lambda f=function, a={**good, argument: value}: f(**a)
        for argument in good.keys() - {"extras", "seed", "stochastic", "scale", "capturable", "scratch_address"}:
            rest = {k: v for k, v in good.items() if k != argument}
            yield f"{name} without {argument}", lambda f=function, a=rest: f(**a)
        yield f"{name} with one more", lambda f=function, a=good: f(**a, one_more=1)
        yield f"{name}()", lambda f=function: f()
        yield f"{name} of many", lambda f=function: f(*range(50))


def random_calls(module: Any, tensors: Tensors, seed: int, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Several arguments at once, each right or spoilt, one at least spoilt."""
    choose = random.Random(seed)
    functions = [(n, g, b) for n, (g, b) in arguments(module, tensors).items()]
    for number in range(count):
        name, good, bad = choose.choice(functions)
        names = choose.sample(sorted(bad), choose.randint(1, min(4, len(bad))))
        spoilt = {argument: choose.choice(bad[argument]) for argument in names}
        shown = f"seed {seed}, call {number}: {name}({', '.join(f'{k}={repr(v)[:60]}' for k, v in spoilt.items())})"
        function = getattr(module, name)
        yield shown, lambda f=function, a={**good, **spoilt}: f(**a)


def works(module: Any, name: str, good: dict[str, Any]) -> bool:
    """Whether arguments that are right are let through; where there is no GPU, to the driver that says so."""
    if module.__name__.endswith("_cuda") and torch.cuda.is_available():
        return True  # these addresses are not its own
    try:
        getattr(module, name)(**good)
    except RuntimeError as error:
        return module.__name__.endswith("_cuda") and "cuda" in str(error)
    return True


def main() -> None:
    module = importlib.import_module(f"statestream.{sys.argv[1]}")
    tensors = Tensors()
    for name, (good, _) in arguments(module, tensors).items():
        assert works(module, name, good), name
    tensors = Tensors()
    made = 0
    seed, count = int(sys.argv[2]), int(sys.argv[3])
    for shown, call in chain(spoilt_calls(module, tensors), random_calls(module, tensors, seed, count)):
        if os.environ.get("STATESTREAM_HOSTILE_VERBOSE"):
            print(shown, file=sys.stderr, flush=True)
        try:
            call()
        except RuntimeError as error:
            raise SystemExit(f"went past the door: {shown}") from error
        except Exception:
            pass
        else:
            raise SystemExit(f"accepted: {shown}")
        if not tensors.untouched():
            raise SystemExit(f"refused, but something was written: {shown}")
        made += 1
    print(made)


if __name__ == "__main__":
    main()
