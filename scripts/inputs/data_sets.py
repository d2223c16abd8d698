"""Read samples: calibration data for quantized activations, and data to compare on.

A data set is a folder of images or arrays, a file of arrays, or a function. It is read one sample
at a time, so that memory does not depend on its size; only a ``.pt`` is loaded as a whole.

Classes are known where a folder has a folder for each, numbered in order of their names, and where
arrays or a function's samples have ``labels`` beside the inputs.
"""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

import numpy as np
import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.patches.torch import pytree
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.input_files import load_archive, to_tensor
from coreml_delegate.scripts.inputs.source import find_callable, importable_from_here, load_torch
from coreml_delegate.source_model import SourceModel
from coreml_delegate.third_party import import_optional, wrap_errors

FORMS = "a folder, FILE.npz, FILE.safetensors or MODULE:FACTORY"
_TORCH = frozenset({".pt", ".pth"})
_READ = frozenset({".npy", ".npz", ".safetensors"}) | _TORCH
_FORMATS = ", ".join(sorted(_READ | images.SUFFIXES))
_LABELS: Final = "labels"
_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


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
            arrays: ``_Rows``, one for every input that is a tensor; other objects are refused.
            labels: ``_Rows``, the right classes, [rows of all samples]; None if not known.
            origin: Where they come from, for messages.

        Raises:
            InputError: Number, dtypes or shapes do not match.
        """
        if len(arrays) != len(self.names) or not all(map(_is_read, arrays)):
            self.sample([_whole_array(array) for array in arrays], origin)  # raises the reason
        pairs = zip(arrays, self.examples, strict=True)
        cuts = [_Cut.of(array, example) for array, example in pairs]
        fitting = [cut for cut in cuts if cut is not None]
        counts = {cut.count for cut in fitting}
        if len(fitting) != len(cuts) or len(counts) > 1:
            yield self.sample([_whole_array(array) for array in arrays], origin)  # raises as well
            return
        (count,) = counts or {1}
        self._check_labels(labels, count, origin)
        for number in range(count):
            where = origin if count == 1 else f"sample {number} of {origin}"
            sample = self.sample([cut.next() for cut in fitting], where)
            sample_labels = None if labels is None else labels.take(self.rows).long()
            yield Sample(sample.leaves, sample_labels)

    def _check_labels(self, labels: Any, count: int, origin: str) -> None:
        if labels is None:
            return
        if not _is_read(labels):
            raise InputError(f"the labels of {origin} are not a tensor", got=type(labels).__name__)
        least = count * self.rows
        if labels.dtype.is_floating_point or len(labels.shape) != 1 or labels.shape[0] < least:
            raise InputError(
                f"the labels of {origin} are not one class per row",
                got=f"{str(labels.dtype).removeprefix('torch.')}{list(labels.shape)}",
                expected=f"{least} integers",
            )


class _Rows(Protocol):
    """An array that is read from its first row to its last.

    Attributes:
        shape: Its sizes.
        dtype: Its element type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def take(self, count: int | None) -> torch.Tensor:
        """Return the next ``count`` rows; None for the whole array."""
        ...


class _TensorRows:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._start = 0
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def take(self, count: int | None) -> torch.Tensor:
        if count is None:
            return self._tensor
        start, self._start = self._start, self._start + count
        return self._tensor[start : self._start]


class _ArrayRows:
    """A ``.npy``, mapped from its file."""

    def __init__(self, file: Path) -> None:
        with _reading(file, "the array"):
            self._array = np.load(file, mmap_mode="r", allow_pickle=False)
        self._file = file
        self._start = 0
        self.shape = tuple(self._array.shape)
        self.dtype = to_tensor(file, np.empty(0, self._array.dtype)).dtype

    def take(self, count: int | None) -> torch.Tensor:
        if count is None:
            return to_tensor(self._file, self._array)
        start, self._start = self._start, self._start + count
        return to_tensor(self._file, self._array[start : self._start])


class _MemberRows:
    """A member of a ``.npz``, read as a stream."""

    def __init__(self, file: Path, stream: IO[bytes], shape: tuple[int, ...], dtype: Any) -> None:
        self._file = file
        self._stream = stream
        self._dtype = dtype
        self.shape = shape
        self.dtype = to_tensor(file, np.empty(0, dtype)).dtype

    def take(self, count: int | None) -> torch.Tensor:
        shape = self.shape if count is None else (count, *self.shape[1:])
        with _reading(self._file):
            content = self._stream.read(math.prod(shape) * self._dtype.itemsize)
            return to_tensor(self._file, np.frombuffer(content, self._dtype).reshape(shape))


class _SliceRows:
    """A tensor of a ``.safetensors``."""

    def __init__(self, file: Path, slices: Any) -> None:
        self._file = file
        self._slices = slices
        self._start = 0
        self.shape = tuple(slices.get_shape())
        with _reading(file):
            self.dtype = (slices[:0] if self.shape else slices[...]).dtype

    def take(self, count: int | None) -> torch.Tensor:
        with _reading(self._file):
            if count is None:
                return self._slices[:] if self.shape else self._slices[...]
            start, self._start = self._start, self._start + count
            return self._slices[start : self._start]


@dataclass(slots=True)
class _Cut:
    """An array, cut into samples.

    Attributes:
        rows: The array.
        count: Number of samples.
        step: Rows of each sample; None if the array is one sample.
        stacked: Whether a row is a sample.
    """

    rows: _Rows
    count: int
    step: int | None
    stacked: bool = False

    @classmethod
    def of(cls, rows: _Rows, example: torch.Tensor) -> _Cut | None:
        """Return how an array is cut, or None if it cannot be."""
        shape, sizes = rows.shape, tuple(example.shape)
        if shape == sizes:
            return cls(rows, 1, None)
        if shape[1:] == sizes:
            return cls(rows, shape[0], 1, stacked=True)
        if sizes and shape and shape[1:] == sizes[1:] and shape[0] >= sizes[0]:
            return cls(rows, shape[0] // sizes[0], sizes[0])
        return None

    def next(self) -> torch.Tensor:
        """Read the next sample."""
        rows = self.rows.take(self.step)
        return rows[0] if self.stacked else rows


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
    with _opened(file) as content:
        arrays, labels = _in_order(content, inputs.names)
        yield from inputs.batches(arrays, labels, str(file))


@contextmanager
def _opened(file: Path) -> Generator[Mapping[str, Any]]:
    """Open a file of arrays; nothing is read yet, except of a ``.pt``."""
    if file.suffix == ".npy":
        yield {"": _ArrayRows(file)}
    elif file.suffix == ".npz":
        with _reading(file):
            archive = zipfile.ZipFile(file)
        with archive:
            yield {
                name.removesuffix(".npy"): _member(file, archive, name)
                for name in archive.namelist()
            }
    elif file.suffix == ".safetensors":
        with _open_safetensors(file) as tensors:
            yield {
                name: _SliceRows(file, tensors.get_slice(name))
                for name in tensors.keys()  # noqa: SIM118 - not a mapping
            }
    else:
        yield {name: _rows_of(value) for name, value in _load_torch(file).items()}


def _member(file: Path, archive: zipfile.ZipFile, name: str) -> _Rows:
    with _reading(file):
        stream = archive.open(name)
        header = _HEADERS.get(np.lib.format.read_magic(stream))
        if header is not None:
            shape, is_fortran, dtype = header(stream)
            if not is_fortran and not dtype.hasobject:
                return _MemberRows(file, stream, shape, dtype)
    return _TensorRows(to_tensor(file, load_archive(file)[name.removesuffix(".npy")]))


@contextmanager
def _open_safetensors(file: Path) -> Generator[Any]:
    library = import_optional("safetensors")
    with _reading(file):
        opened = library.safe_open(str(file), framework="pt")
    with opened as tensors:
        yield tensors


@contextmanager
def _reading(file: Path, what: str = "the arrays") -> Generator[None]:
    try:
        yield
    except (InputError, OptionError):
        raise
    except Exception as error:  # readers fail on foreign bytes with whatever comes first
        raise OptionError(f"cannot read {what} in {file}", got=str(error)) from error


def _in_order(arrays: Mapping[str, Any], names: Sequence[str]) -> tuple[list[Any], Any]:
    """Return the arrays in the order of the inputs, by name or else as stored, and the labels."""
    inputs = dict(arrays)
    labels = inputs.pop(_LABELS, None) if _LABELS not in names else None
    if set(names) == set(inputs):
        return [inputs[name] for name in names], labels
    return list(inputs.values()), labels


def _load_torch(file: Path) -> Mapping[str, Any]:
    expected = "a tensor, or several in a tuple or dict, saved by torch.save"
    return _by_name(load_torch(file, "tensors", expected))


def _by_name(value: object) -> Mapping[str, Any]:
    """Return values by name; a tuple's values, or a single value, by position."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    listed = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    return {str(position): item for position, item in enumerate(listed)}


def _is_read(value: object) -> bool:
    return isinstance(value, _TensorRows | _ArrayRows | _MemberRows | _SliceRows)


def _whole_array(value: Any) -> Any:
    return value.take(None) if _is_read(value) else value


def _rows_of(value: Any) -> Any:
    """Return a tensor as rows, and any other object unchanged, to be refused where it is used."""
    return _TensorRows(value) if _is_tensor(value) else value


def _samples_of_factory(
    where: str, module: str, name: str, inputs: _SampleShape
) -> Iterator[Sample]:
    with importable_from_here():
        factory = find_callable(module, name, FORMS)
        samples: Iterable[Any] = _call(where, factory)
        for number, sample in enumerate(samples):
            origin = f"sample {number} of {where}"
            rows = {key: _rows_of(value) for key, value in _by_name(sample).items()}
            arrays, labels = _in_order(rows, inputs.names)
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
