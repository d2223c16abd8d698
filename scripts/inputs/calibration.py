"""Reads calibration data: samples whose values decide the ranges of quantized activations.

All samples are read and checked before the long work begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.input_files import load_archive, load_array, to_tensor
from coreml_delegate.scripts.inputs.source import find_callable, importable_from_here
from coreml_delegate.source_model import SourceModel
from coreml_delegate.third_party import describe_error, wrap_errors

FORMS = "a folder, FILE.npz or MODULE:FACTORY"
_READ = frozenset({".npy", ".npz", ".pt", ".pth"})
_FORMATS = ", ".join(sorted(_READ | images.SUFFIXES))


def read_calibration(where: str, source: SourceModel, *, limit: int) -> list[list[Any]]:
    """Read calibration samples.

    Args:
        where: A folder of images or arrays, a ``.npz`` with an array for every input, or
            ``MODULE:FACTORY``, whose result is iterated: tensors, or tuples or dicts of them.
        source: The model; a sample must be like its example inputs.
        limit: Number of samples to read at most, the first in order of file names.

    Returns:
        Samples, each flattened as ``source.leaves``.

    Raises:
        InputError: A sample does not fit the model's inputs.
        OptionError: The data do not exist, are empty or cannot be read.
    """
    samples = list(itertools.islice(_read(where, _SampleShape(source)), limit))
    if not samples:
        raise OptionError("no calibration data", got=where, expected=f"files in {_FORMATS}")
    return samples


def _read(where: str, inputs: _SampleShape) -> Iterator[list[Any]]:
    path = Path(where)
    if path.is_dir():
        return _folder(path, inputs)
    if path.suffix in _READ:
        if not path.is_file():
            raise OptionError("no such calibration file", got=where, expected=FORMS)
        return _samples_of(path, inputs)
    module, separator, name = where.partition(":")
    if not (module and separator and name):
        raise OptionError("no such calibration data", got=repr(where), expected=FORMS)
    return _samples_of_factory(where, module, name, inputs)


class _SampleShape:
    """Checks samples against the tensors among a model's example inputs.

    Args:
        source: The model.
    """

    def __init__(self, source: SourceModel) -> None:
        self._leaves = source.leaves
        self._structure = pytree.tree_structure((source.args, dict(source.kwargs)))
        self._tensors = [n for n, leaf in enumerate(self._leaves) if _is_tensor(leaf)]
        names = source.input_names
        self.names = [names[n] for n in self._tensors]

    @property
    def examples(self) -> list[torch.Tensor]:
        """The example inputs that are tensors."""
        return [self._leaves[n] for n in self._tensors]

    def sample(self, tensors: Sequence[Any], origin: str) -> list[Any]:
        """Return one sample, flattened as the example inputs.

        Args:
            tensors: One tensor for every input that is a tensor.
            origin: Where they come from, for messages.

        Raises:
            InputError: Number, dtypes or shapes do not match.
        """
        if len(tensors) != len(self.names):
            raise InputError(
                f"{origin} does not have as many tensors as the model has inputs",
                got=str(len(tensors)),
                expected=f"{len(self.names)} ({', '.join(self.names)})",
            )
        leaves = list(self._leaves)
        checked = zip(self._tensors, self.names, self.examples, tensors, strict=True)
        for place, name, example, tensor in checked:
            if not _is_tensor(tensor) or _signature(tensor) != _signature(example):
                raise InputError(
                    f"{origin} does not fit input {name}",
                    got=_text(tensor),
                    expected=_text(example),
                )
            leaves[place] = tensor
        return leaves

    def batches(self, tensors: Sequence[torch.Tensor], origin: str) -> Iterator[list[Any]]:
        """Yield the samples that tensors hold.

        A tensor may be one sample, a stack of samples, or have a larger batch, which is cut; a
        remainder is not used.

        Raises:
            InputError: Number, dtypes or shapes do not match.
        """
        if len(tensors) != len(self.names):
            self.sample(tensors, origin)
        parts = [
            _cut(tensor, example) for tensor, example in zip(tensors, self.examples, strict=True)
        ]
        fitting = [part for part in parts if part is not None]
        if len(fitting) != len(parts) or len({len(part) for part in fitting}) > 1:
            yield self.sample(tensors, origin)  # raises with the reason
            return
        for number, sample in enumerate(zip(*fitting, strict=True)):
            yield self.sample(sample, f"sample {number} of {origin}")


def _cut(tensor: torch.Tensor, example: torch.Tensor) -> list[torch.Tensor] | None:
    shape, wanted = tuple(tensor.shape), tuple(example.shape)
    if shape == wanted:
        return [tensor]
    if shape[1:] == wanted:
        return list(tensor)
    if wanted and shape[1:] == wanted[1:] and shape and shape[0] >= wanted[0]:
        whole = shape[0] // wanted[0] * wanted[0]
        return list(tensor[:whole].split(wanted[0]))
    return None


def _folder(path: Path, inputs: _SampleShape) -> Iterator[list[Any]]:
    files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    if not files:
        raise OptionError("the folder of calibration data is empty", got=str(path))
    others = [f.name for f in files if f.suffix.lower() not in _READ | images.SUFFIXES]
    if others:
        raise OptionError(
            "the folder of calibration data has files of other formats",
            got=", ".join(others[:3]),
            expected=_FORMATS,
        )
    with console.progress(files, "Reading calibration data") as shown:
        for file in shown:
            yield from _samples_of(file, inputs)


def _samples_of(file: Path, inputs: _SampleShape) -> Iterator[list[Any]]:
    if file.suffix.lower() in images.SUFFIXES:
        if len(inputs.names) != 1:
            raise InputError(
                f"{file} is an image, but the model has several inputs",
                got=f"{len(inputs.names)} inputs ({', '.join(inputs.names)})",
                expected="one",
                remedy="Give it arrays in .npz files",
            )
        (example,) = inputs.examples
        image = images.read_image(file, tuple(example.shape), example.dtype)
        yield inputs.sample([image], str(file))
        return
    yield from inputs.batches(_tensors_of(file, inputs.names), str(file))


def _tensors_of(file: Path, names: Sequence[str]) -> list[Any]:
    """Return the tensors of a file in the order of the inputs, by name or else as stored."""
    if file.suffix == ".npy":
        return [to_tensor(file, load_array(file))]
    if file.suffix == ".npz":
        arrays = load_archive(file)
        held: Mapping[str, Any] = {name: to_tensor(file, array) for name, array in arrays.items()}
    else:
        loaded = _load_torch(file)
        if not isinstance(loaded, dict):
            return list(cast("Sequence[Any]", loaded)) if _is_list(loaded) else [loaded]
        held = cast("Mapping[str, Any]", loaded)
    return _in_order(held, names)


def _in_order(held: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    return [held[name] for name in names] if set(names) == set(held) else list(held.values())


def _load_torch(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # its reader fails on foreign bytes with whatever comes first
        raise OptionError(
            f"cannot read tensors from {file}",
            got=describe_error(error),
            expected="a tensor, or several in a tuple or dict, saved by torch.save",
        ) from error


def _samples_of_factory(
    where: str, module: str, name: str, inputs: _SampleShape
) -> Iterator[list[Any]]:
    with importable_from_here():
        factory = find_callable(module, name, FORMS)
        samples: Iterable[Any] = _call(where, factory)
        for number, sample in enumerate(samples):
            yield inputs.sample(_values(sample, inputs.names), f"sample {number} of {where}")


def _values(sample: object, names: Sequence[str]) -> list[Any]:
    if isinstance(sample, Mapping):
        return _in_order(cast("Mapping[str, Any]", sample), names)
    return list(cast("Sequence[Any]", sample)) if _is_list(sample) else [sample]


def _call(where: str, factory: Any) -> Iterator[Any]:
    """Yield the items that a user's function returns; it may be a generator and may print."""
    with wrap_errors(f"{where} fails"):
        made = iter(factory())
    end = object()
    while True:
        with wrap_errors(f"{where} fails"):
            item = next(made, end)
        if item is end:
            return
        yield item


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
