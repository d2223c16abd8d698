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
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.patches.third_party import import_optional, wrap_errors
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.runtime.program.plan import describe
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.input_files import load_archive, load_array, to_tensor
from coreml_delegate.scripts.inputs.source import find_callable, importable_from_here, load_torch

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
        limit: Number of samples to read at most, the first in order of file names; None for all.
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
        self._limit = limit
        self._called = called
        self._image = image
        self._leaves = source.leaves
        # Position, name and example of each input that is a tensor.
        self._inputs = [
            (n, name, leaf)
            for n, (name, leaf) in enumerate(zip(source.input_names, source.leaves, strict=True))
            if isinstance(leaf, torch.Tensor)
        ]
        self._names = [name for _, name, _ in self._inputs]
        shape = self._inputs[0][2].shape if self._inputs else ()
        self._rows = shape[0] if shape else 1

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
            return self._file(path)
        module, separator, name = self._where.partition(":")
        if not (module and separator and name):
            raise OptionError(f"no such {self._called}", got=repr(self._where), expected=FORMS)
        return self._factory(module, name)

    def _folder(self, path: Path) -> Iterator[Sample]:
        entries = self._listed(path)
        if not any(entry.is_dir() for entry in entries):
            for file in self._files(entries):
                yield from self._file(file)
            return
        files = [entry.name for entry in entries if not entry.is_dir()]
        if files:
            raise OptionError(
                f"the folder of {self._called} has files beside folders of classes",
                got=", ".join(files[:3]),
            )
        for label, folder in enumerate(entries):
            for file in self._files(self._listed(folder)):
                for sample in self._file(file):
                    yield Sample(sample.leaves, torch.full((self._rows,), label))

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

    def _file(self, file: Path) -> Iterator[Sample]:
        if file.suffix.lower() not in images.SUFFIXES:
            yield from self._samples(_read_arrays(file), str(file))
            return
        if len(self._inputs) != 1:
            raise InputError(
                f"{file} is an image, but the model has several inputs",
                got=f"{len(self._names)} inputs ({', '.join(self._names)})",
                expected="one",
                remedy="Give it arrays in .npz files",
            )
        example = self._inputs[0][2]
        shape = tuple(example.shape)
        if self._image is None:
            image = images.read_image(file, shape, example.dtype)
        else:
            image = images.read_picture(file, self._image, shape).to(example.dtype)
        yield self._sample([image], str(file))

    def _factory(self, module: str, name: str) -> Iterator[Sample]:
        with importable_from_here():
            factory = find_callable(module, name, FORMS)
            for number, sample in enumerate(_call(self._where, factory)):
                yield from self._samples(_by_name(sample), f"sample {number} of {self._where}")

    def _samples(self, arrays_by_name: Mapping[str, Any], origin: str) -> Iterator[Sample]:
        """Yield the samples in arrays, by name or else in the order of the inputs.

        An array may be one sample, a stack of samples, or have a larger batch, which is cut; a
        remainder is dropped.
        """
        inputs = dict(arrays_by_name)
        labels = inputs.pop(_LABELS, None) if _LABELS not in self._names else None
        is_named = set(self._names) == set(inputs)
        arrays = [inputs[name] for name in self._names] if is_named else list(inputs.values())
        if len(arrays) != len(self._names):
            raise InputError(
                f"{origin} does not have as many tensors as the model has inputs",
                got=str(len(arrays)),
                expected=f"{len(self._names)} ({', '.join(self._names)})",
            )
        examples = [example for _, _, example in self._inputs]
        parts = [_samples_in(*pair) for pair in zip(arrays, examples, strict=True)]
        counts = set(map(len, parts)) or {1}
        if len(counts) > 1 or not all(counts):
            yield self._sample(arrays, origin)  # raises the reason
            return
        (count,) = counts
        self._check_labels(labels, count, origin)
        for number in range(count):
            name = origin if count == 1 else f"sample {number} of {origin}"
            sample = self._sample([part[number] for part in parts], name)
            start = number * self._rows
            classes = None if labels is None else labels[start : start + self._rows].long()
            yield Sample(sample.leaves, classes)

    def _sample(self, tensors: Sequence[Any], origin: str) -> Sample:
        """Return the sample of one tensor for every input that is a tensor."""
        leaves = list(self._leaves)
        for (position, name, example), tensor in zip(self._inputs, tensors, strict=True):
            expected = describe(example.dtype, example.shape)
            is_tensor = isinstance(tensor, torch.Tensor)
            got = describe(tensor.dtype, tensor.shape) if is_tensor else type(tensor).__name__
            if got != expected:
                raise InputError(f"{origin} does not fit input {name}", got=got, expected=expected)
            leaves[position] = tensor
        return Sample(leaves)

    def _check_labels(self, labels: Any, count: int, origin: str) -> None:
        if labels is None:
            return
        if not isinstance(labels, torch.Tensor):
            raise InputError(f"the labels of {origin} are not a tensor", got=type(labels).__name__)
        least = count * self._rows
        if labels.dtype.is_floating_point or labels.dim() != 1 or len(labels) < least:
            raise InputError(
                f"the labels of {origin} are not one class per row",
                got=describe(labels.dtype, labels.shape),
                expected=f"{least} integers",
            )


@dataclass(frozen=True, slots=True)
class _Inputs:
    samples: Iterable[Sample]

    def __iter__(self) -> Iterator[list[Any]]:
        return (sample.leaves for sample in self.samples)


def read_calibration(
    where: str, source: SourceModel, *, limit: int, image: Feature | None = None
) -> list[list[Any]]:
    """Read all calibration samples at once, so that bad data fail before the long work begins.

    Returns:
        Samples, each flattened as ``source.leaves``.
    """
    with console.step("Reading calibration data"):
        data = DataSet(where, source, limit=limit, called="calibration data", image=image)
        return [sample.leaves for sample in data]


def _samples_in(array: Any, example: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut an array into samples like ``example``; no samples if it has another shape."""
    if not isinstance(array, torch.Tensor):
        return ()
    shape, sizes = tuple(array.shape), tuple(example.shape)
    if shape == sizes:
        return (array,)
    if shape[1:] == sizes:
        return cast("Sequence[torch.Tensor]", array)  # a stack: its rows are the samples
    if sizes and shape and shape[1:] == sizes[1:] and shape[0] >= sizes[0]:
        return array[: shape[0] // sizes[0] * sizes[0]].split(sizes[0])
    return ()


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


def _by_name(value: object) -> Mapping[str, Any]:
    """Return values by name; a tuple's values, or a single value, by position."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    listed = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    return {str(position): item for position, item in enumerate(listed)}


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
