"""The model a user names on the command line, with inputs to trace it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from coreml_delegate.errors import CoreMLDelegateError, OptionError
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs import vision
from coreml_delegate.scripts.inputs.sampling import generator, random_tensor
from coreml_delegate.scripts.inputs.weights import load_weights

_CAPTURE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "DynamicOutputShapeException": "The size of its result depends on values: write the model "
        "without it, or keep it out of the model",
        "DataDependentOutputException": "It gives Python what depends on values: write the model "
        "without it, or keep it out of the model",
        "GuardOnDataDependentSymNode": "Use torch.cond or torch.where for what depends on values; "
        "torch.export.draft_export(model, inputs) names the line",
    }
)
FORMS = "torchvision:NAME, MODULE:FACTORY or FILE.pt2"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One eager run.

    Attributes:
        results: What the model returned, flattened; not all of it need be tensors.
        inputs: The inputs after the run, flattened: the model may have written them.
    """

    results: tuple[Any, ...]
    inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A model in PyTorch.

    Attributes:
        module: Called for the expected outputs.
        args: Example positional inputs.
        kwargs: Example keyword inputs.
        exported: The program, if the source is one; else None and ``module`` is to be traced.
    """

    module: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    exported: ExportedProgram | None

    @property
    def leaves(self) -> list[Any]:
        """The example inputs, flattened to the order in which a program takes them."""
        return pytree.tree_leaves((self.args, dict(self.kwargs)))

    @property
    def input_names(self) -> list[str]:
        """Names of ``leaves``: the parameters of ``forward``, and the place inside of one."""
        parameters = [*inspect.signature(_forward_of(self.module)).parameters]
        paths, _ = pytree.tree_flatten_with_path((self.args, dict(self.kwargs)))
        return [_input_name(path, parameters) for path, _ in paths]

    def structured(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword inputs from ``leaves``."""
        _, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return pytree.tree_unflatten(list(leaves), structure)

    def execute(self, leaves: Sequence[Any]) -> Outcome:
        """Run eagerly, on copies of the inputs.

        Args:
            leaves: Inputs, as many and in the order of ``leaves``.

        Raises:
            OptionError: The model refuses the inputs.
        """
        copies = copied(leaves)
        args, kwargs = self.structured(copies)
        with torch.no_grad(), blaming("the model fails on these inputs"):
            results = self.module(*args, **kwargs)
            register_dataclasses(results)
        return Outcome(tuple(pytree.tree_leaves(results)), tuple(copies))

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run eagerly; see ``execute``.

        Returns:
            The tensors among the outputs, flattened.
        """
        return [leaf for leaf in self.execute(leaves).results if isinstance(leaf, torch.Tensor)]

    def export(self, dynamic_shapes: Any = None) -> ExportedProgram:
        """The program, traced with the example inputs unless it was loaded.

        Args:
            dynamic_shapes: For ``torch.export.export``; None for fixed shapes.

        Raises:
            OptionError: ``torch.export`` cannot capture the model.
        """
        if self.exported is not None:
            return self.exported
        with torch.no_grad(), blaming("torch.export cannot capture the model", _capture_remedy):
            try:
                return self._trace(dynamic_shapes)
            except Exception:
                if not self._registers_result():
                    raise
                return self._trace(dynamic_shapes)

    def _trace(self, dynamic_shapes: Any) -> ExportedProgram:
        return torch.export.export(
            cast("nn.Module", self.module),
            self.args,
            dict(self.kwargs),
            dynamic_shapes=dynamic_shapes,
        )

    def _registers_result(self) -> bool:
        """Whether the result of the model has dataclasses that were unknown to torch."""
        try:
            return register_dataclasses(self.module(*self.args, **self.kwargs))
        except Exception:  # noqa: BLE001 - what torch.export said is said, which has the line
            return False


def copied(leaves: Sequence[Any]) -> list[Any]:
    """Inputs that may be written."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def load_source(
    source: str, *, shapes: Sequence[tuple[int, ...]], weights: Path | None, seed: int
) -> Source:
    """Load or build a model; equal arguments give equal random weights and inputs.

    Args:
        source: ``torchvision:NAME``, ``MODULE:FACTORY`` or ``FILE.pt2``.
        shapes: Input shapes that replace the source's own example inputs by random float32 ones.
        weights: State dict to load, or None.
        seed: For random weights and inputs.

    Raises:
        OptionError: No such source, or it cannot be loaded, or it needs a shape.
    """
    if source.endswith(".pt2"):
        if weights is not None:
            raise OptionError("--weights goes with a model, and a .pt2 has its weights inside")
        loaded = _load_exported(Path(source))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded = _build(source, shapes)
        if weights is not None:
            load_weights(cast("nn.Module", loaded.module), weights)
    if shapes:
        random = generator(seed)
        args = tuple(random_tensor(torch.float32, shape, random) for shape in shapes)
        return Source(loaded.module, args, {}, loaded.exported)
    if not loaded.leaves:
        raise OptionError(f"{source} brings no example inputs", remedy="Pass --input-shape")
    return loaded


def by_parameter(
    module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a call gives each parameter: the form in which ``torch.export`` takes dynamic shapes.

    Keyword inputs may come in any order, which is that of the program's inputs.
    """
    return dict(inspect.signature(_forward_of(module)).bind(*args, **kwargs).arguments)


def _load_exported(path: Path) -> Source:
    if not path.is_file():
        raise OptionError("no such file", got=str(path), expected=FORMS)
    with blaming(f"{path} is not a program saved by torch.export.save"):
        program = torch.export.load(path)
        module = program.module()
    args, kwargs = program.example_inputs or ((), {})
    return Source(module, tuple(args), kwargs, program)


def _build(source: str, shapes: Sequence[tuple[int, ...]]) -> Source:
    where, separator, name = source.partition(":")
    if not (where and separator and name):
        raise OptionError("no such source", got=repr(source), expected=FORMS)
    if where == "torchvision":
        module = vision.build_model(name)
        shape = vision.input_shape(name)
        return Source(module, () if shapes else (torch.randn(shape),), {}, None)
    with importable_from_here():
        factory = find_callable(where, name, FORMS)
        with blaming(f"{source} fails"):
            made = factory if isinstance(factory, nn.Module) else factory()
    return _from_factory(source, made)


def find_callable(module_name: str, name: str, forms: str) -> Any:
    """What ``MODULE:NAME`` names.

    Args:
        module_name: To import.
        name: In it, with dots for what is inside.
        forms: What the user could have meant instead, for messages.

    Raises:
        OptionError: It cannot be imported, or is not there, or cannot be called.
    """
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(f"cannot import {module_name}", got=str(error)) from error
        raise OptionError("no such Python module", got=repr(module_name), expected=forms) from None
    except Exception as error:
        raise OptionError(f"cannot import {module_name}", got=console.first_line(error)) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise OptionError(f"{module_name} has no callable of that name", got=repr(name))
    return found


def _from_factory(source: str, made: Any) -> Source:
    module, *inputs = _parts(made)
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"{source} makes no model",
            got=type(made).__name__,
            expected="an nn.Module, (nn.Module, example_inputs) or (nn.Module, args, kwargs)",
        )
    args, kwargs = _example_inputs(source, inputs)
    register_dataclasses((args, kwargs))
    return Source(module.eval(), args, kwargs, None)


def _parts(made: object) -> Sequence[Any]:
    """The parts of what a factory returns; a whole that has none is the only part."""
    return (cast("Sequence[Any]", made) if isinstance(made, list | tuple) else ()) or (made,)


def _example_inputs(source: str, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, from the parts that a factory returns behind the model."""
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
                f"{source} makes no example inputs",
                got=", ".join(type(value).__name__ for value in inputs),
                expected="a tensor, a tuple of inputs, a dict of keyword inputs, or such a tuple "
                "and such a dict",
            )


def _forward_of(module: Callable[..., Any]) -> Callable[..., Any]:
    return module.forward if isinstance(module, nn.Module) else module


def _input_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    _, argument, *inner = path  # the first says whether it is positional
    name = getattr(argument, "key", None)
    if name is None:
        name = parameters[argument.idx] if argument.idx < len(parameters) else argument.idx
    return f"{name}{pytree.keystr(tuple(inner))}"


@contextmanager
def importable_from_here() -> Generator[None]:
    """Let a user's modules be imported: from the current folder, as ``python -m`` does.

    They, or a library they use, may import torchvision.
    """
    sys.path.insert(0, "")
    try:
        with vision.torchvision_importable():
            yield
    finally:
        sys.path.remove("")


def register_dataclasses(tree: Any) -> bool:
    """Let torch know the dataclasses that are in a model's inputs or results.

    Args:
        tree: The inputs or results.

    Returns:
        Whether there are any that it did not know.
    """
    unknown = {type(leaf) for leaf in pytree.tree_leaves(tree) if is_dataclass(leaf)} - {type}
    for kind in unknown:
        torch.export.register_dataclass(kind)
    if unknown:
        register_dataclasses(tree)  # now that it can be looked into
    return bool(unknown)


def _capture_remedy(error: Exception) -> str:
    otherwise = "With -v the traceback names the line of the model"
    return _CAPTURE_REMEDIES.get(type(error).__name__, otherwise)


@contextmanager
def blaming(
    what: str, remedy_of: Callable[[Exception], str | None] = lambda _: None
) -> Generator[None]:
    """Turn whatever foreign code raises into one line that says whose failure it is.

    Args:
        what: The failure.
        remedy_of: What the user can do about an exception, or None.
    """
    try:
        with console.captured():
            yield
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise OptionError(what, got=console.first_line(error), remedy=remedy_of(error)) from error
