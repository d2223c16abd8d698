"""Program inputs from files: arrays and images."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.formats.added_steps import BRIGHTEST
from coreml_delegate.runtime.loading import Input
from coreml_delegate.runtime.program.plan import describe
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.random_tensors import random_tensor

_ARRAYS = ".npy"
_ARCHIVES = ".npz"
FORMATS = ", ".join((_ARRAYS, _ARCHIVES, *sorted(images.SUFFIXES)))


def random_inputs(inputs: Sequence[Input], random: torch.Generator) -> list[Any]:
    """Return a random value for every input (see ``random_value``), or its fixed value."""
    return [random_value(input_, random) if input_.is_tensor else input_.fixed for input_ in inputs]


def random_value(input_: Input, random: torch.Generator) -> torch.Tensor:
    """Return random pixels from 0 to 255 for an image; see ``random_tensor`` for other inputs."""
    if input_.image is None:
        return random_tensor(input_.dtype, input_.shape, random)
    return random_tensor(torch.uint8, input_.shape, random, high=BRIGHTEST).to(input_.dtype)


def read_inputs(paths: Sequence[Path], inputs: Sequence[Input]) -> list[Any]:
    """Read the inputs of a program.

    Args:
        paths: In the order of the inputs. A ``.npz`` holds several: by name if its names are the
            inputs', else in the stored order.
        inputs: The program's inputs; inputs with a fixed value are not read.

    Raises:
        InputError: Files hold more, fewer or other inputs than the program has, or an input does
            not take an image.
        OptionError: A file cannot be read.
    """
    tensors = [input_ for input_ in inputs if input_.is_tensor]
    named: dict[str, torch.Tensor] = {}
    for path in paths:
        remaining = [input_ for input_ in tensors if input_.name not in named]
        named |= dict(_read(path, remaining))
    missing = [input_ for input_ in tensors if input_.name not in named]
    if missing:
        raise InputError(
            "the files hold too few inputs",
            got=str(len(named)),
            expected=", ".join(f"{p.name} {describe(p.dtype, p.shape)}" for p in tensors),
        )
    return [named[input_.name] if input_.is_tensor else input_.fixed for input_ in inputs]


def _read(path: Path, remaining: Sequence[Input]) -> Iterator[tuple[str, torch.Tensor]]:
    if not path.is_file():
        raise OptionError("no such input file", got=str(path))
    if path.suffix == _ARCHIVES:
        arrays = load_archive(path)
        names = {input_.name for input_ in remaining}
        unknown = [name for name in arrays if name not in names]
        if unknown and len(unknown) < len(arrays):
            raise InputError(
                f"{path} names inputs that the program does not have, or that are given already",
                got=", ".join(unknown),
                expected=", ".join(input_.name for input_ in remaining),
            )
        if unknown:
            _require(path, len(arrays), remaining)
            arrays = dict(zip((input_.name for input_ in remaining), arrays.values(), strict=False))
        yield from ((name, to_tensor(path, array)) for name, array in arrays.items())
        return
    _require(path, 1, remaining)
    input_ = remaining[0]
    if path.suffix == _ARRAYS:
        yield input_.name, to_tensor(path, load_array(path))
    elif path.suffix.lower() in images.SUFFIXES:
        if input_.image is None:
            yield input_.name, images.read_image(path, input_.shape, input_.dtype)
        else:
            yield input_.name, images.read_picture(path, input_.image, input_.shape)
    else:
        raise OptionError("unknown kind of input file", got=str(path), expected=FORMATS)


def _require(path: Path, count: int, remaining: Sequence[Input]) -> None:
    if count > len(remaining):
        raise InputError(
            f"{path} holds more inputs than are left", got=str(count), expected=str(len(remaining))
        )


def load_array(path: Path, *, is_mapped: bool = False) -> Any:
    """Read the array of a ``.npy``, or map it from the file.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        return np.load(path, "c" if is_mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise OptionError(f"cannot read the array in {path}", got=str(error)) from error


def load_archive(path: Path) -> Mapping[str, Any]:
    """Read the arrays of a ``.npz`` by name.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise OptionError(f"cannot read the arrays in {path}", got=str(error)) from error


def to_tensor(path: Path, array: Any) -> torch.Tensor:
    """Convert an array of a file to a tensor.

    Raises:
        InputError: Torch does not have the element type.
    """
    try:
        return torch.from_numpy(np.asarray(array, order="C"))
    except TypeError as error:
        raise InputError(f"{path} holds no tensor", got=str(array.dtype)) from error
