"""An optimizer and its model side by side: what a program does to both, and what must be equal afterwards."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch import Tensor
from torch.nn import Parameter

from .arithmetic import Settings
from .compare import Mismatch, check
from .formats import FP32, memory_order, patterns_of
from .program import Program
from .reference import Group, Param, Reference, Saved

__all__ = ["World"]

SHAPES = (
    *((), (0,), (1,), (3,), (17,), (256,), (300,), (530,), (2, 3), (5, 0, 2), (1, 1), (7, 40), (4, 1, 3)),
    *((2, 3, 2, 2), (1, 1, 9, 1), (3, 5, 7), (16, 33)),
)
BETAS = ((0.9, 0.999), (0.8, 0.95), (0.9, 0.999), (0.0, 0.99), (0.3, 0.4), (0.9, 0.0), (0.99, 0.99999))
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -3e38, 2e-23], np.float32)
COUNTS = (0, 1, 1000, 2**24 - 1, 2**24)


@dataclass
class Checkpoint:
    state_dict: dict[str, Any]
    saved: Saved


class World:
    def __init__(self, program: Program):
        self.program, self.setup = program, program.setup
        self.params: dict[int, Parameter] = {}
        self.models: dict[int, Param] = {}
        self.checkpoints: list[Checkpoint] = []
        self.left_behind: list[World] = []
        self.reference = Reference(self.setup.form)
        members: list[list[int]] = [[] for _ in range(self.setup.groups)]
        for key in program.kept_params:
            self._add_param(key)
            members[program.random("group of", key).randrange(self.setup.groups)].append(key)
        if self.setup.listed_twice and members[0]:
            members[0].append(members[0][0])
        self.named = self.setup.named and all(
            members
        )  # torch takes names of all groups or of none, an empty one has none
        draw = program.random("settings")
        for keys in members:
            self.reference.groups.append(Group([self.models[key] for key in keys], self._settings(draw)))
        self.optimizer: Any = self._built()

    def _add_param(self, key: int) -> None:
        draw, values = self.program.random("param", key), self.program.values(0, key)
        tensor = torch.from_numpy(values.standard_normal(draw.choice(SHAPES)).astype(np.float32))
        tensor = self._laid_out(tensor.to(draw.choice(self.setup.dtypes)), draw)
        self.params[key] = Parameter(tensor, requires_grad=draw.random() < 0.9)
        self.models[key] = Param(
            tuple(tensor.shape), tensor.dtype, memory_order(tensor), patterns_of(tensor), self.params[key].requires_grad
        )

    def _settings(self, draw: Random) -> Settings:
        return Settings(
            lr=draw.choice((1e-3, 0.1, 3e-2, 0.0, draw.random())),
            betas=draw.choice(BETAS),
            eps=draw.choice((1e-8, 1e-6, 1e-3, 0.0)),
            weight_decay=draw.choice((0.0, 0.1, 0.01, draw.random())),
            decoupled=self.setup.decoupled_decay,
            maximize=draw.random() < 0.2,
            bias_correction=draw.random() < 0.85,
        )

    # ---- building ----

    def _real(self, model: Param) -> Parameter:
        return next(self.params[key] for key, other in self.models.items() if other is model)

    def _group_dict(self, group: Group) -> dict[str, Any]:
        params = [self._real(param) for param in group.params]
        settings = group.settings
        return {
            "params": [(f"p{i}", p) for i, p in enumerate(params)] if self.named else params,
            "lr": torch.tensor(settings.lr) if self.setup.tensor_lr else settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "maximize": settings.maximize,
            "bias_correction": settings.bias_correction,
        }

    def _built(self) -> FusedAdam:
        """A new FusedAdam over the parameters in their groups."""
        setup, form = self.setup, self.setup.form
        return FusedAdam(
            [self._group_dict(group) for group in self.reference.groups],
            adam_w_mode=setup.decoupled_decay,
            capturable=form.capturable,
            master_weights=form.master is not None,
            master_weight_dtype=torch.float16 if form.master == "fp16" else FP32,
            exp_avg_dtype=form.exp_avg,
            exp_avg_sq_dtype=form.exp_avg_sq,
            use_decoupled_grad=setup.decoupled_grad,
            store_param_remainders=form.master == "remainders",
            state_dict_cpu_offload=setup.to_host,
            export_staging_bytes=setup.staging_bytes,
            stochastic_rounding=form.stochastic,
            seed=form.seed,
        )

    def _wrapped(self, optimizer: FusedAdam, draw: Random) -> CPUOffloadOptimizer:
        return CPUOffloadOptimizer(
            optimizer,
            step_chunk_bytes=draw.choice((None, 1, 3_000, 9_000, 1 << 20)),
            cpu_fraction=draw.choice((0.0, 0.0, 0.4, 1.0, "auto")),
            cpu_threads=draw.choice((None, 1)),
            state_dict_snapshot=draw.random() < 0.7,
        )

    @property
    def is_wrapped(self) -> bool:
        return isinstance(self.optimizer, CPUOffloadOptimizer)

    @staticmethod
    def _laid_out(tensor: Tensor, draw: Random) -> Tensor:
        """The values in one of the layouts that a dense tensor may have, perhaps at an odd address."""
        order = list(range(tensor.dim()))
        if draw.random() < 0.3 and tensor.dim() <= 3:
            draw.shuffle(order)
        elif draw.random() < 0.3 and tensor.dim() == 4:
            # Not any: an index map has three levels, and where it would need four, random bits of scaled formats are
            # not those of the index.
            order = draw.choice(((0, 2, 3, 1), (2, 3, 0, 1), (3, 0, 1, 2)))
        moved = tensor.permute(order).contiguous()
        offset = draw.choice((0, 0, 1, 3))
        room = torch.empty(offset + moved.numel(), dtype=tensor.dtype)
        laid = room[offset:].view(moved.shape).copy_(moved)
        return laid.permute([list(order).index(d) for d in range(tensor.dim())])

    # ---- operations: each draws from its own generator, and does nothing where it does not apply ----

    def run(self, number: int) -> None:
        getattr(self, self.program.name(number))(number, self.program.random("choices of", number))

    def step(self, number: int, draw: Random) -> None:
        scale = draw.choice((1.0, 1.0, 1024.0, 3.7))
        given = self._set_grads(number, draw)
        self._stepped(given, scale)

    def skip(self, number: int, draw: Random) -> None:
        self._stepped(self._set_grads(number, draw), 1.0, found_inf=True)

    def step_without_gradients(self, number: int, draw: Random) -> None:
        self._stepped({}, 1.0)

    def _stepped(self, given: dict[int, np.ndarray], scale: float, found_inf: bool = False) -> None:
        if scale != 1.0 or found_inf:
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(scale), torch.tensor(float(found_inf))
        self.optimizer.step()
        if scale != 1.0 or found_inf:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        self.optimizer.zero_grad()
        self.reference.step(given, float(np.float32(scale)), found_inf)

    def _set_grads(self, number: int, draw: Random) -> dict[int, np.ndarray]:
        given: dict[int, np.ndarray] = {}
        chance = draw.choice((1.0, 0.8))
        for key, param in self.params.items():
            own = self.program.random("gradient", number, key)
            if not param.requires_grad or own.random() > chance:
                continue
            values = self.program.values(1, number, key)
            decades = values.uniform(-5, 2, param.shape if own.random() < 0.5 else ())
            numbers = values.standard_normal(param.shape) * 10.0**decades
            if own.random() < 0.3:
                numbers = np.where(values.random(param.shape) < 0.4, 0.0, numbers)
            if own.random() < 0.05:
                numbers = np.where(values.random(param.shape) < 0.1, values.choice(SPECIAL, param.shape), numbers)
            dtype = own.choice((FP32, torch.bfloat16, torch.float16)) if self.setup.decoupled_grad else param.dtype
            grad = torch.from_numpy(np.asarray(numbers, np.float32)).to(dtype)
            if own.random() < 0.1 and param.dim() and param.shape[0]:
                grad = grad[:1].expand(param.shape)
            elif own.random() < 0.4:
                grad = self._laid_out(grad, own)
            elif own.random() < 0.5:
                grad = torch.empty_strided(param.shape, param.stride(), dtype=dtype).copy_(grad)
            if self.setup.decoupled_grad:
                param.decoupled_grad = grad
            else:
                param.grad = grad
            given[id(self.models[key])] = grad.float().contiguous().reshape(-1).numpy().copy()
        return given

    def edit_settings(self, number: int, draw: Random) -> None:
        place = draw.randrange(len(self.reference.groups))
        group, settings = self.optimizer.param_groups[place], self.reference.groups[place].settings
        fresh = self._settings(draw)
        for name in draw.sample(("lr", "betas", "eps", "weight_decay", "maximize", "bias_correction"), 2):
            value = getattr(fresh, name)
            setattr(settings, name, value)
            if name == "lr" and isinstance(group["lr"], Tensor) and draw.random() < 0.5:
                group["lr"].fill_(value)
            else:
                group[name] = value

    def write_weights(self, number: int, draw: Random) -> None:
        """From outside: as a model that is loaded, as a trainer that replaces data, and through `.data`."""
        way = draw.choice(("copied", "replaced", "untraced"))
        for key, param in self.params.items():
            own = self.program.random("written", number, key)
            if own.random() < 0.4:
                continue
            values = torch.from_numpy(self.program.values(2, number, key).standard_normal(param.shape)).to(param.dtype)
            part = torch.rand(param.shape, generator=torch.Generator().manual_seed(own.getrandbits(30))) < 0.5
            new = torch.where(part, values, param.detach())
            if way == "copied":
                with torch.no_grad():
                    param.copy_(new)
            elif way == "untraced":
                param.data.copy_(new)
            else:
                param.data = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype).copy_(new)
            self.models[key].weights = patterns_of(param)
        if way == "untraced":
            self.optimizer.refresh_masters()
            if not self.is_wrapped:
                for model in self.models.values():
                    if model.state is not None and "master_param" in model.state.kinds:
                        self.reference.refresh(model, self.reference.follow(model))

    def save(self, number: int, draw: Random) -> None:
        state_dict, saved = self.optimizer.state_dict(), self.reference.save()
        if state_dict["state"].keys() != saved.states.keys():
            raise Mismatch(f"saved states {sorted(state_dict['state'])}, the model's are {sorted(saved.states)}")
        snapshot = self.optimizer.state_dict_snapshot if self.is_wrapped else self.setup.to_host
        way = draw.choice(("copied", "filed", "kept") if snapshot else ("copied", "filed"))
        if way == "copied":
            state_dict = copy.deepcopy(state_dict)
        elif way == "filed":
            state_dict = _filed(state_dict)
        self.checkpoints.append(Checkpoint(state_dict, saved))

    def load(self, number: int, draw: Random) -> None:
        if not self.checkpoints:
            return
        found = draw.choice(self.checkpoints)
        if draw.random() < 0.25:
            found, count = copy.deepcopy(found), draw.choice(COUNTS)
            for place, (_, values) in found.saved.states.items():
                found.saved.states[place] = np.float32(count), values
                found.state_dict["state"][place]["step"] = torch.tensor(float(count))
        self._loaded(found, draw, lambda optimizer: optimizer.load_state_dict(found.state_dict))

    def reload(self, number: int, draw: Random) -> None:
        """Its own state dict, live tensors and all."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.reference.load(self.reference.save())

    def through_dcp(self, number: int, draw: Random) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        groups = self.reference.groups
        once = len(self.params) == sum(len(group.params) for group in groups)
        trained = all(param.requires_grad for param in self.params.values())
        if not (once and trained and all(group.params for group in groups)):
            return  # upstream's form does not hold these
        model = torch.nn.ParameterList(list(self.params.values()))
        state_dict = _filed(get_optimizer_state_dict(model, self.optimizer))
        found = Checkpoint(state_dict, self.reference.save())
        self._loaded(found, draw, lambda optimizer: set_optimizer_state_dict(model, optimizer, state_dict))

    def _loaded(self, found: Checkpoint, draw: Random, load: Any) -> None:
        into = draw.choice(("itself", "itself", "fresh", "fresh and wrapped"))
        target = self.optimizer if into == "itself" else self._built()
        if into == "fresh and wrapped" and not self.setup.form.capturable:
            target = self._wrapped(target, draw)
        if self.reference.refuses(found.saved):
            try:
                load(target)
            except ValueError:
                return
            raise Mismatch("a state dict that does not fit was loaded")
        load(target)
        if into != "itself":
            for model in self.models.values():
                model.state = None
        self.optimizer = target
        self.reference.load(found.saved)

    def add_group(self, number: int, draw: Random) -> None:
        if len(self.params) > 8:
            return
        keys = [100 * (number + 1) + i for i in range(draw.choice((1, 2) if self.named else (0, 1, 2)))]
        for key in keys:
            self._add_param(key)
        group = Group([self.models[key] for key in keys], self._settings(draw))
        self.optimizer.add_param_group(self._group_dict(group))
        self.reference.groups.append(group)

    def duplicate(self, number: int, draw: Random) -> None:
        """Goes on with a copy; the original must stay as it is."""
        original = copy.copy(self)
        original.left_behind = []
        whole = (self.params, self.optimizer)
        if draw.random() < 0.5:
            self.params, self.optimizer = copy.deepcopy(whole)
        else:
            self.params, self.optimizer = pickle.loads(pickle.dumps(whole))
        self.models, self.reference = copy.deepcopy((self.models, self.reference))
        self.left_behind.append(original)
        for param in self.params.values():
            param.grad = None
        if self.is_wrapped:  # its state is wrapped anew
            self._all_follow()

    def _all_follow(self) -> None:
        for model in self.models.values():
            if model.state is not None:
                self.reference.follow(model)

    def move(self, number: int, draw: Random) -> None:
        """To another dtype, layout or address; by `.data`, or as torch swaps tensors."""
        what, by_swap = draw.choice(("dtype", "dtypes", "layout", "address")), draw.random() < 0.4
        dtype, chosen = draw.choice((FP32, torch.bfloat16, torch.float16)), draw.random()
        for i, (key, param) in enumerate(self.params.items()):
            own = self.program.random("moved", number, key)
            if what == "dtype" and i != int(chosen * len(self.params)):
                continue
            old = param.detach()
            if what in ("dtype", "dtypes"):
                new = old.to(dtype)
            elif what == "layout":
                new = self._laid_out(old, own)
            else:
                room = torch.empty(old.numel() + 5, dtype=old.dtype)
                new = room[5:].as_strided(old.shape, old.stride(), 5).copy_(old)
            if by_swap:
                torch.utils.swap_tensors(param, Parameter(new, requires_grad=param.requires_grad))
            else:
                param.data = new
            model = self.models[key]
            model.dtype, model.order, model.weights = new.dtype, memory_order(new), patterns_of(new)

    def freeze(self, number: int, draw: Random) -> None:
        self._require(draw, False)

    def unfreeze(self, number: int, draw: Random) -> None:
        self._require(draw, True)

    def _require(self, draw: Random, grad: bool) -> None:
        key = draw.choice(list(self.params))
        self.params[key].requires_grad_(grad)
        self.models[key].requires_grad = grad

    def wrap(self, number: int, draw: Random) -> None:
        if self.is_wrapped or self.setup.form.capturable:
            return
        self._all_follow()
        self.optimizer = self._wrapped(self.optimizer, draw)

    def check(self) -> None:
        """Raises Mismatch where optimizer and model differ in any bit."""
        check(self.optimizer, self.params, self.reference, self.models)

    def end(self) -> None:
        for original in self.left_behind:
            original.check()


def _filed(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
