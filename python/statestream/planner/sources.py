"""A model's shapes out of files: a Hugging Face config.json, safetensors files or their index, a DCP checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statestream.dcp_metadata import METADATA, tensors_in
from statestream.planner.families import FAMILIES, shapes_of
from statestream.planner.formats import WEIGHTS, format_named
from statestream.planner.model import Model, Parameter, model_of_size, shape_of
from statestream.planner.quantities import MOST, BadOption

__all__ = ["read_model"]

_INDEX = ".safetensors.index.json"
_HEADER_LIMIT = 100 << 20
"""Bytes of a safetensors header: the format's own limit."""

_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
_NO_WEIGHTS = re.compile(r"[IU]\d+|BOOL")
"""Safetensors dtypes of counters and masks."""

_STATE = re.compile(r"(?:^|\.)state\.(?P<param>.+)\.[^.]+$")
"""Keys of an optimizer's state in a DCP checkpoint: "optim.state.layers.0.weight.exp_avg"."""


def read_model(path: Path) -> Model:
    """By what is at `path`, a file or a folder. A folder's safetensors files come before its config.json, which come
    before an index alone. BadOption, naming the file, where there is nothing that can be read."""
    try:
        model = _read(path)
    except OSError as error:
        found = path if error.filename is None else Path(error.filename)
        raise BadOption("source", f"{str(found)!r} cannot be read: {error.strerror or error}") from None
    if not 1 <= model.elements <= MOST:
        found = f"{model.elements:.3g}" if model.elements < 1e300 else "more than 1e+300"  # which no float may hold
        raise BadOption("source", f"{str(path)!r} has {found} parameters; a plan is of 1 to {MOST:.0e}")
    return model


def _read(path: Path) -> Model:
    if not path.exists():
        raise BadOption("source", f"{str(path)!r} does not exist")
    if path.is_dir():
        return _read_folder(path)
    if path.name == METADATA:
        return _from_checkpoint(path)
    if path.suffix == ".safetensors":
        return _from_files([path], path)
    values = _json(path)
    if "weight_map" in values:
        return _from_index(path, values)
    return _from_config(path, values)


def _read_folder(path: Path) -> Model:
    if (path / METADATA).exists():
        return _from_checkpoint(path / METADATA)
    files = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob(f"*{_INDEX}"))
    if indices:
        parts = {path / name for name in _weight_map(indices[0], _json(indices[0])).values()}
        if all(part.exists() for part in parts):
            return _from_files(sorted(parts), path)
    elif files:
        return _from_files(files, path)
    if (path / "config.json").exists():
        return _read(path / "config.json")
    if indices:
        return _read(indices[0])
    raise BadOption("source", f"{str(path)!r} has no config.json, no safetensors files and no {METADATA} of DCP in it")


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadOption("source", f"{str(path)!r} is no JSON file: {error}") from None
    if not isinstance(values, dict):
        raise BadOption("source", f"{str(path)!r} holds no object; expected a config.json or a safetensors index")
    return values


# ---- safetensors ----


def _from_files(files: list[Path], source: Path) -> Model:
    parameters = []
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            try:
                shape, dtype = shape_of(entry["shape"]), str(entry["dtype"])
            except (KeyError, TypeError, ValueError):
                raise BadOption("source", f"{str(file)!r} has a header that says no shape of {name!r}") from None
            if _NO_WEIGHTS.fullmatch(dtype):
                continue
            if dtype not in _SAFETENSORS_DTYPES:
                known = ", ".join(_SAFETENSORS_DTYPES)
                raise BadOption("source", f"{name!r} in {str(file)!r} is stored as {dtype!r}; use {known}")
            parameters.append(Parameter(name, shape, _SAFETENSORS_DTYPES[dtype]))
    if not parameters:
        raise BadOption("source", f"{str(source)!r} holds no weights of {', '.join(_SAFETENSORS_DTYPES)}")
    return Model(str(source), tuple(parameters))


def _header(file: Path) -> dict[str, Any]:
    """Names to dtypes and shapes: JSON behind 8 bytes with its length, at the beginning of the file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_HEADER_LIMIT, file.stat().st_size):
            raise BadOption("source", f"{str(file)!r} is no safetensors file: its header would have {length} bytes")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadOption("source", f"{str(file)!r} is no safetensors file: its header is not JSON")
    return header


def _weight_map(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    found = values.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise BadOption("source", f"{str(path)!r} has no weight_map of names to files")
    return found


def _from_index(path: Path, values: Mapping[str, Any]) -> Model:
    """With its files beside it their shapes; without, the number of bytes that it states."""
    names = _weight_map(path, values)
    parts = {path.parent / name for name in names.values()}
    if all(part.exists() for part in parts):
        return _from_files(sorted(parts), path)
    metadata = values.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, (int, float)) or isinstance(total, bool) or not 2 <= total <= 1e18:
        raise BadOption("source", f"{str(path)!r} states no total_size, and its files are not beside it")
    made = model_of_size(int(total) // 2, len(names))
    remark = f"Shapes are not known, the files of the index are not there: its {int(total):,} bytes are taken for BF16."
    return Model(str(path), tuple(Parameter(p.name, p.shape, "bf16") for p in made.parameters), (remark,))


# ---- torch.distributed.checkpoint ----


def _from_checkpoint(path: Path) -> Model:
    """The weights in a checkpoint: its floating-point tensors that are no optimizer's state; where there are none, the
    parameters that its optimizer has state of."""
    try:
        tensors = tensors_in(path)
    except ValueError as error:
        raise BadOption("source", str(error)) from None
    weights = [
        Parameter(key, shape, _float_name(dtype))
        for key, (shape, dtype) in tensors.items()
        if not _STATE.search(key) and _float_name(dtype) and shape
    ]
    if weights:
        return Model(str(path.parent), tuple(weights))
    trained: dict[str, tuple[int, ...]] = {}
    for key, (shape, _) in tensors.items():
        match = _STATE.search(key)
        if match and shape:
            trained.setdefault(match["param"], shape)
    if not trained:
        raise BadOption("source", f"{str(path.parent)!r} holds neither weights nor the state of an optimizer")
    remark = "The checkpoint holds an optimizer's state alone: how its weights are stored is not known."
    return Model(str(path.parent), tuple(Parameter(n, s) for n, s in trained.items()), (remark,))


def _float_name(dtype: str) -> str | None:
    try:
        return format_named("dtype", dtype, WEIGHTS).name if dtype != "uint8" else None
    except BadOption:
        return None


# ---- config.json ----


def _from_config(path: Path, values: dict[str, Any]) -> Model:
    named = values.get("model_type")
    if not isinstance(named, str):
        raise BadOption("source", f"{str(path)!r} has no model_type; expected a config.json of Hugging Face")
    shapes = shapes_of(values)
    remarks = ()
    if shapes is None:
        shapes = _by_transformers(path, values)
        remarks = (f"Shapes of {named!r} are from transformers.",)
    stated = values.get("torch_dtype") or values.get("dtype")
    if stated is not None and not isinstance(stated, (str, dict)):  # a dict says it of parts of a model
        raise BadOption("source", f"torch_dtype is {stated!r} in {str(path)!r}; it must be a name such as bfloat16")
    try:
        dtype = format_named("source", stated, WEIGHTS).name if isinstance(stated, str) else None
    except BadOption as error:
        raise BadOption("source", f"torch_dtype in {str(path)!r}: {error.problem}") from None
    return Model(f"{path} ({named})", tuple(Parameter(n, s, dtype) for n, s in shapes), remarks)


def _by_transformers(path: Path, values: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Of a family that is not known here: transformers builds it without memory, where it is installed."""
    named = values["model_type"]
    advice = f"its shapes are known of {', '.join(FAMILIES)}; of others where transformers is installed"
    try:
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise BadOption("source", f"model_type {named!r} of {str(path)!r} is not known: {advice}") from None
    try:
        config = AutoConfig.for_model(**values)
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config)
            except ValueError:  # it is no language model
                model = AutoModel.from_config(config)
    except Exception as error:  # whatever a model's own code raises for a config that it does not like
        said = " ".join(str(error).split())[:200]
        raise BadOption("source", f"transformers builds no {named!r} from {str(path)!r}: {said}") from None
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]
