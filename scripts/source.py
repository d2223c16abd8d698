"""The model a user names on the command line, with inputs to trace it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from coreml_delegate.errors import CoreMLDelegateError, OptionError
from coreml_delegate.scripts import console, vision
from coreml_delegate.scripts.sampling import generator, random_tensor
from coreml_delegate.scripts.weights import load_weights

FORMS = "torchvision:NAME, MODULE:FACTORY or FILE.pt2"


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

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run eagerly.

        Args:
            leaves: Inputs, as many and in the order of ``leaves``.

        Returns:
            The tensors among the outputs, flattened.

        Raises:
            OptionError: The model refuses the inputs.
        """
        _, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = pytree.tree_unflatten(list(leaves), structure)
        with torch.no_grad(), _blaming("the model fails on these inputs"):
            results = self.module(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]

    def export(self) -> ExportedProgram:
        """The program, traced with the example inputs unless it was loaded.

        Raises:
            OptionError: ``torch.export`` cannot capture the model.
        """
        if self.exported is not None:
            return self.exported
        with torch.no_grad(), _blaming("torch.export cannot capture the model"):
            return torch.export.export(cast("nn.Module", self.module), self.args, dict(self.kwargs))


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


def _load_exported(path: Path) -> Source:
    if not path.is_file():
        raise OptionError("no such file", got=str(path), expected=FORMS)
    with _blaming(f"{path} is not a program saved by torch.export.save"):
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
    with _importable_from_here():
        factory = _find(where, name)
        with _blaming(f"{source} fails"):
            made = factory if isinstance(factory, nn.Module) else factory()
    return _from_factory(source, made)


def _find(module_name: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(f"cannot import {module_name}", got=str(error)) from error
        raise OptionError("no such Python module", got=repr(module_name), expected=FORMS) from None
    except Exception as error:
        raise OptionError(f"cannot import {module_name}", got=console.first_line(error)) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise OptionError(f"{module_name} has no callable of that name", got=repr(name))
    return found


def _from_factory(source: str, made: Any) -> Source:
    module, args = cast("Sequence[Any]", made) if _is_pair(made) else (made, ())
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"{source} makes no model",
            got=type(made).__name__,
            expected="an nn.Module, or (nn.Module, example_inputs)",
        )
    inputs = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(inputs, list | tuple):
        raise OptionError(
            f"{source} makes no example inputs",
            got=type(args).__name__,
            expected="a tensor or a tuple of inputs",
        )
    return Source(module.eval(), tuple(cast("Sequence[Any]", inputs)), {}, None)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(cast("Sequence[object]", value)) == 2


@contextmanager
def _importable_from_here() -> Generator[None]:
    """Let modules in the current folder be imported, as ``python -m`` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


@contextmanager
def _blaming(what: str) -> Generator[None]:
    """Turn whatever foreign code raises into one line that says whose failure it is."""
    try:
        with console.captured():
            yield
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise OptionError(what, got=console.first_line(error)) from error
