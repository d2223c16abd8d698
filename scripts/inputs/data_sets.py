"""Read samples: calibration data for quantized activations, and data to compare on.

A data set is a folder of images or arrays, a file of arrays, or a function. Files of a folder and
samples of a function are read one at a time. A ``.npy`` or ``.safetensors`` is mapped; a ``.npz``
or ``.pt`` is loaded as a whole.

Classes are known where a folder has a folder for each, numbered in order of their names, and where
arrays or a function's samples have ``labels`` beside the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.patches.torch import pytree
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.input_files import load_archive, load_array, to_tensor
from coreml_delegate.scripts.inputs.source import find_callable, importable_from_here, load_torch
from coreml_delegate.source_model import SourceModel
from coreml_delegate.third_party import import_optional, wrap_errors

FORMS = "a folder, FILE.npz, FILE.safetensors or MODULE:FACTORY"
_TORCH = frozenset({".pt", ".pth"})
_READ = frozenset({".npy", ".npz", ".safetensors"}) | _TORCH
_FORMATS = ", ".join(sorted(_READ | images.SUFFIXES))
_LABELS: Final = "labels"


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs of one call.

    Attributes:
        leaves: Flattened as ``SourceModel.leaves``.
        labels: The right class of each row, [rows], int64; None if they are not known.
    """

    leaves: list[Any]
    labels: torch.Tensor | None = None


class DataSet:
    """Samples like a model's example inputs, read anew in each iteration.

    Args:
        where: A folder of images or arrays, or of such folders, one for each class; a file with an
            array for every input; or ``MODULE:FACTORY``, whose result is iterated: tensors, or
            tuples or dicts of them.
        source: The model.
        limit: Number of samples to read at most, the first in order of file names; None for all.
        called: Name of the data, for messages.
        image: The declared image input that pictures are read for; None to preprocess them as for
            ImageNet.

    Raises:
        InputError: While it is read: a sample does not fit the model's inputs.
        OptionError: While it is read: the data do not exist, are empty or cannot be read.
    """

    def __init__(
        self,
        where: str,
        source: SourceModel,
        *,
        limit: int | None = None,
        called: str = "data",
        image: Feature | None = None,
    ) -> None:
        self._where = where
        self._inputs = _SampleShape(source, image)
        self._limit = limit
        self._called = called

    def __iter__(self) -> Iterator[Sample]:
        """Read the samples."""
        is_empty = True
        for sample in itertools.islice(self._read(), self._limit):
            is_empty = False
            yield sample
        if is_empty:
            raise OptionError(
                f"no {self._called}", got=self._where, expected=f"files in {_FORMATS}"
            )

    @property
    def inputs(self) -> Iterable[list[Any]]:
        """The inputs of the samples, without labels; can be iterated repeatedly."""
        return _Inputs(self)

    def _read(self) -> Iterator[Sample]:
        path = Path(self._where)
        if path.is_dir():
            return self._folder(path)
        if path.suffix in _READ:
            if not path.is_file():
                kind = self._called.removesuffix(" data")
                raise OptionError(f"no such {kind} file", got=self._where, expected=FORMS)
            return _samples_of(path, self._inputs)
        module, separator, name = self._where.partition(":")
        if not (module and separator and name):
            raise OptionError(f"no such {self._called}", got=repr(self._where), expected=FORMS)
        return _samples_of_factory(self._where, module, name, self._inputs)

    def _folder(self, path: Path) -> Iterator[Sample]:
        entries = self._listed(path)
        if not any(entry.is_dir() for entry in entries):
            for file in self._files(entries):
                yield from _samples_of(file, self._inputs)
            return
        files = [entry.name for entry in entries if not entry.is_dir()]
        if files:
            raise OptionError(
                f"the folder of {self._called} has files beside folders of classes",
                got=", ".join(files[:3]),
            )
        for label, folder in enumerate(entries):
            for file in self._files(self._listed(folder)):
                for sample in _samples_of(file, self._inputs):
                    yield Sample(sample.leaves, self._inputs.labels_of(label))

    def _listed(self, path: Path) -> list[Path]:
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        if not entries:
            raise OptionError(f"the folder of {self._called} is empty", got=str(path))
        return entries

    def _files(self, entries: Sequence[Path]) -> Sequence[Path]:
        suffixes = _READ | images.SUFFIXES
        names = [e.name for e in entries if e.is_dir() or e.suffix.lower() not in suffixes]
        if names:
            raise OptionError(
                f"the folder of {self._called} has files of other formats",
                got=", ".join(names[:3]),
                expected=_FORMATS,
            )
        return entries


@dataclass(frozen=True, slots=True)
class _Inputs:
    samples: Iterable[Sample]

    def __iter__(self) -> Iterator[list[Any]]:
        return (sample.leaves for sample in self.samples)


def read_calibration(
    where: str, source: SourceModel, *, limit: int, image: Feature | None = None
) -> list[list[Any]]:
    """Read all calibration samples at once, so that bad data fail before the long work begins.

    Args:
        where: See ``DataSet``, as for the errors.
        source: The model; a sample must be like its example inputs.
        limit: Number of samples to read at most, the first in order of file names.
        image: See ``DataSet``.

    Returns:
        Samples, each flattened as ``source.leaves``.
    """
    with console.step("Reading calibration data"):
        data = DataSet(where, source, limit=limit, called="calibration data", image=image)
        return [sample.leaves for sample in data]


class _SampleShape:
    """Checks samples against the tensors among a model's example inputs.

    Args:
        source: The model.
        image: See ``DataSet``.
    """

    def __init__(self, source: SourceModel, image: Feature | None) -> None:
        self.image = image
        self._leaves = source.leaves
        self._structure = pytree.tree_structure((source.args, dict(source.kwargs)))
        self._tensors = [n for n, leaf in enumerate(self._leaves) if _is_tensor(leaf)]
        names = source.input_names
        self.names = [names[n] for n in self._tensors]

    @property
    def examples(self) -> list[torch.Tensor]:
        """The tensors among the example inputs."""
        return [self._leaves[n] for n in self._tensors]

    @property
    def rows(self) -> int:
        """Number of rows of a sample: the first size of the first input."""
        shape = self.examples[0].shape if self._tensors else ()
        return shape[0] if shape else 1

    def labels_of(self, label: int) -> torch.Tensor:
        """Return the labels of a sample whose rows are of one class."""
        return torch.full((self.rows,), label)

    def sample(self, tensors: Sequence[Any], origin: str) -> Sample:
        """Return one sample, without labels.

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
        for position, name, example, tensor in checked:
            if not _is_tensor(tensor) or _signature(tensor) != _signature(example):
                raise InputError(
                    f"{origin} does not fit input {name}",
                    got=_text(tensor),
                    expected=_text(example),
                )
            leaves[position] = tensor
        return Sample(leaves)

    def batches(self, arrays: Sequence[Any], labels: Any, origin: str) -> Iterator[Sample]:
        """Yield the samples in ``arrays``.

        An array may be one sample, a stack of samples, or have a larger batch, which is cut; a
        remainder is dropped.

        Args:
            arrays: Tensors, one for every input that is a tensor; other objects are refused.
            labels: Tensor of the right classes, [rows of all samples]; None if not known.
            origin: Where they come from, for messages.

        Raises:
            InputError: Number, dtypes or shapes do not match.
        """
        if len(arrays) != len(self.names):
            self.sample(arrays, origin)  # raises the reason
        parts = [_samples_in(*pair) for pair in zip(arrays, self.examples, strict=True)]
        counts = set(map(len, parts)) or {1}
        if len(counts) > 1 or not all(counts):
            yield self.sample(arrays, origin)  # raises as well
            return
        (count,) = counts
        self._check_labels(labels, count, origin)
        for number in range(count):
            name = origin if count == 1 else f"sample {number} of {origin}"
            sample = self.sample([part[number] for part in parts], name)
            start = number * self.rows
            classes = None if labels is None else labels[start : start + self.rows].long()
            yield Sample(sample.leaves, classes)

    def _check_labels(self, labels: Any, count: int, origin: str) -> None:
        if labels is None:
            return
        if not _is_tensor(labels):
            raise InputError(f"the labels of {origin} are not a tensor", got=type(labels).__name__)
        least = count * self.rows
        if labels.dtype.is_floating_point or len(labels.shape) != 1 or labels.shape[0] < least:
            raise InputError(
                f"the labels of {origin} are not one class per row",
                got=f"{str(labels.dtype).removeprefix('torch.')}{list(labels.shape)}",
                expected=f"{least} integers",
            )


def _samples_in(array: Any, example: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut an array into samples like ``example``; no samples if it has another shape."""
    if not _is_tensor(array):
        return ()
    shape, sizes = tuple(array.shape), tuple(example.shape)
    if shape == sizes:
        return (array,)
    if shape[1:] == sizes:
        return array  # a stack: its rows are the samples
    if sizes and shape and shape[1:] == sizes[1:] and shape[0] >= sizes[0]:
        return array[: shape[0] // sizes[0] * sizes[0]].split(sizes[0])
    return ()


def _samples_of(file: Path, inputs: _SampleShape) -> Iterator[Sample]:
    if file.suffix.lower() in images.SUFFIXES:
        if len(inputs.names) != 1:
            raise InputError(
                f"{file} is an image, but the model has several inputs",
                got=f"{len(inputs.names)} inputs ({', '.join(inputs.names)})",
                expected="one",
                remedy="Give it arrays in .npz files",
            )
        (example,) = inputs.examples
        shape = tuple(example.shape)
        if inputs.image is None:
            image = images.read_image(file, shape, example.dtype)
        else:
            image = images.read_picture(file, inputs.image, shape).to(example.dtype)
        yield inputs.sample([image], str(file))
        return
    arrays, labels = _in_order(_read_arrays(file), inputs.names)
    yield from inputs.batches(arrays, labels, str(file))


def _read_arrays(file: Path) -> Mapping[str, Any]:
    """Read a file of arrays, by name; a ``.npy`` or ``.safetensors`` is mapped, not read."""
    if file.suffix == ".npy":
        return {"": to_tensor(file, load_array(file, is_mapped=True))}
    if file.suffix == ".npz":
        return {name: to_tensor(file, array) for name, array in load_archive(file).items()}
    if file.suffix == ".safetensors":
        library = import_optional("safetensors.torch")
        with wrap_errors(f"cannot read the arrays in {file}"):
            return library.load_file(file)
    expected = "a tensor, or several in a tuple or dict, saved by torch.save"
    return _by_name(load_torch(file, "tensors", expected))


def _in_order(arrays: Mapping[str, Any], names: Sequence[str]) -> tuple[list[Any], Any]:
    """Return the arrays in the order of the inputs, by name or else as stored, and the labels."""
    inputs = dict(arrays)
    labels = inputs.pop(_LABELS, None) if _LABELS not in names else None
    if set(names) == set(inputs):
        return [inputs[name] for name in names], labels
    return list(inputs.values()), labels


def _by_name(value: object) -> Mapping[str, Any]:
    """Return values by name; a tuple's values, or a single value, by position."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    listed = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    return {str(position): item for position, item in enumerate(listed)}


def _samples_of_factory(
    where: str, module: str, name: str, inputs: _SampleShape
) -> Iterator[Sample]:
    with importable_from_here():
        factory = find_callable(module, name, FORMS)
        samples: Iterable[Any] = _call(where, factory)
        for number, sample in enumerate(samples):
            origin = f"sample {number} of {where}"
            arrays, labels = _in_order(_by_name(sample), inputs.names)
            yield from inputs.batches(arrays, labels, origin)


def _call(where: str, factory: Any) -> Iterator[Any]:
    """Yield the items that a user's function returns; it may be a generator and may print."""
    with wrap_errors(f"{where} fails"):
        items = iter(factory())
    end = object()
    while True:
        with wrap_errors(f"{where} fails"):
            item = next(items, end)
        if item is end:
            return
        yield item


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
