"""The model a user names on the command line, with inputs to trace it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.exported.containers import name_return_types, register_containers
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.patches.third_party import (
    describe_error,
    import_optional,
    torchvision_importable,
    wrap_errors,
)
from coreml_delegate.scripts.inputs import vision
from coreml_delegate.scripts.inputs.random_tensors import generator, random_tensor
from coreml_delegate.scripts.stablehlo_files import is_stablehlo

FORMS = "torchvision:NAME, timm:NAME, MODULE:FACTORY or FILE.pt2"
_MAX_LISTED = 3  # names in a message


def load_source(
    source: str, *, shapes: Sequence[tuple[int, ...]], weights: Path | None, seed: int
) -> SourceModel:
    """Load or build a model; equal arguments give equal random weights and inputs.

    Args:
        source: ``torchvision:NAME``, ``timm:NAME``, ``MODULE:FACTORY`` or ``FILE.pt2``.
        shapes: Input shapes of random float32 inputs that replace the source's example inputs.
        weights: State dict to load, or None.
        seed: Seed of random weights and inputs.

    Raises:
        OptionError: The source does not exist, cannot be loaded, or needs a shape.
    """
    if is_stablehlo(source):
        raise OptionError(
            "a StableHLO file is no PyTorch model",
            got=source,
            remedy="Use coreml-delegate convert",
        )
    if source.endswith(".pt2"):
        if weights is not None:
            raise OptionError("--weights is for a model; a .pt2 has its own weights")
        loaded = _load_exported(Path(source))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded = _build(source, shapes)
        if weights is not None:
            _load_weights(cast("nn.Module", loaded.module), weights)
    if shapes:
        random = generator(seed)
        args = tuple(random_tensor(torch.float32, shape, random) for shape in shapes)
        return SourceModel(loaded.module, args, {}, loaded.exported)
    if not loaded.leaves:
        raise OptionError(f"{source} has no example inputs", remedy="Pass --input-shape")
    return loaded


def _load_exported(path: Path) -> SourceModel:
    if not path.is_file():
        raise OptionError("no such file", got=str(path), expected=FORMS)
    name_return_types()
    with wrap_errors(f"{path} is not a program saved by torch.export.save"):
        program = torch.export.load(path)
        module = program.module()
    args, kwargs = program.example_inputs or ((), {})
    return SourceModel(module, tuple(args), kwargs, program)


def _build(source: str, shapes: Sequence[tuple[int, ...]]) -> SourceModel:
    where, separator, name = source.partition(":")
    if not (where and separator and name):
        raise OptionError("no such source", got=repr(source), expected=FORMS)
    if where == "torchvision":
        module = vision.build_model(name)
        shape = vision.input_shape(name)
        return SourceModel(module, () if shapes else (torch.randn(shape),), {}, None)
    if where == "timm":
        module, shape = vision.build_timm_model(name)
        return SourceModel(module, () if shapes else (torch.randn(shape),), {}, None)
    with importable_from_here():
        factory = find_callable(where, name, FORMS)
        with wrap_errors(f"{source} fails"):
            result = factory if isinstance(factory, nn.Module) else factory()
    return _from_factory(source, result)


def find_callable(module_name: str, name: str, forms: str) -> Any:
    """Return the callable that ``MODULE:NAME`` names.

    Raises:
        OptionError: The module cannot be imported, or the name does not exist or is not callable.
    """
    if module_name.endswith(".py"):
        path = Path(module_name)
        raise OptionError(
            "no such Python module",
            got=repr(module_name),
            expected=forms,
            remedy=f"In the folder {path.parent.resolve()}, write {path.stem}:{name}",
        )
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(f"cannot import {module_name}", got=str(error)) from error
        raise OptionError("no such Python module", got=repr(module_name), expected=forms) from None
    except Exception as error:
        raise OptionError(f"cannot import {module_name}", got=describe_error(error)) from error
    for part in name.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise OptionError(f"{module_name} has no callable of that name", got=repr(name))
    return target


def _from_factory(source: str, result: Any) -> SourceModel:
    module, *inputs = _parts(result)
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"{source} returns no model",
            got=type(result).__name__,
            expected="an nn.Module, (nn.Module, example_inputs) or (nn.Module, args, kwargs)",
        )
    args, kwargs = _example_inputs(source, inputs)
    register_containers((args, kwargs))
    return SourceModel(module.eval(), args, kwargs, None)


def _parts(result: object) -> Sequence[Any]:
    """Return a factory's result as a sequence; anything but a list or tuple is its only item."""
    return (cast("Sequence[Any]", result) if isinstance(result, list | tuple) else ()) or (result,)


def _example_inputs(source: str, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs from the items after the model in a factory's result."""
    match inputs:
        case []:
            return (), {}
        case [torch.Tensor() as tensor]:
            return (tensor,), {}
        case [list() | tuple() as args]:
            return tuple(cast("Sequence[Any]", args)), {}
        case [Mapping() as kwargs]:
            return (), dict(cast("Mapping[str, Any]", kwargs))
        case [list() | tuple() as args, Mapping() as kwargs]:
            return tuple(cast("Sequence[Any]", args)), dict(cast("Mapping[str, Any]", kwargs))
        case _:
            raise OptionError(
                f"{source} returns no example inputs",
                got=", ".join(type(value).__name__ for value in inputs),
                expected="a tensor, a tuple of inputs, a dict of keyword inputs, or a tuple and "
                "a dict",
            )


@contextmanager
def importable_from_here() -> Generator[None]:
    """Make modules of the current folder importable, as ``python -m`` does.

    The modules, or a library they use, may import torchvision.
    """
    sys.path.insert(0, "")
    try:
        with torchvision_importable():
            yield
    finally:
        sys.path.remove("")


def _load_weights(module: nn.Module, path: Path) -> None:
    """Load a state dict into ``module``.

    Args:
        module: Changed in place, or not at all.
        path: ``.safetensors``, or a file of ``torch.save`` (read without running code).

    Raises:
        OptionError: The file cannot be read, or does not fit the model.
    """
    if not path.is_file():
        raise OptionError("no such weights file", got=str(path))
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    expected = module.state_dict()
    _refuse(path, "lacks tensors of the model", [k for k in expected if k not in state])
    _refuse(path, "has tensors the model lacks", [k for k in state if k not in expected])
    _refuse(
        path,
        "has tensors of another shape",
        [
            f"{key} {list(state[key].shape)} for {list(tensor.shape)}"
            for key, tensor in expected.items()
            if state[key].shape != tensor.shape
        ],
    )
    module.load_state_dict(state)


def _refuse(path: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        raise OptionError(f"{path} {what}", got=", ".join(names[:_MAX_LISTED]) + more)


def load_torch(path: Path, what: str, expected: str) -> object:
    """Read a file of ``torch.save``, without running code in it.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of any class on foreign bytes
        raise OptionError(
            f"cannot read {what} from {path}", got=describe_error(error), expected=expected
        ) from error


def _read_torch(path: Path) -> Mapping[str, torch.Tensor]:
    state = load_torch(path, "weights", "a state dict of tensors saved by torch.save")
    items = cast("Mapping[object, object]", state) if isinstance(state, Mapping) else {None: None}
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items.items()):
        raise OptionError(
            f"{path} is not a state dict",
            got=type(state).__name__,
            expected="tensors by name",
            remedy="Save module.state_dict()",
        )
    return cast("Mapping[str, torch.Tensor]", state)


def _read_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    reader = import_optional("safetensors.torch")
    try:
        return reader.load_file(path)
    except Exception as error:  # its error class lives in its native module
        raise OptionError(f"cannot read weights from {path}", got=str(error)) from error
