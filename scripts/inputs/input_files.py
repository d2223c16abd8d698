"""Program inputs from files: arrays and images."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.runtime.pictures import BRIGHTEST
from coreml_delegate.runtime.program.plan import describe
from coreml_delegate.scripts.inputs import images
from coreml_delegate.scripts.inputs.sampling import random_tensor
from coreml_delegate.scripts.programs import Port

_ARRAYS = ".npy"
_ARCHIVES = ".npz"
FORMATS = ", ".join((_ARRAYS, _ARCHIVES, *sorted(images.SUFFIXES)))


def random_inputs(ports: Sequence[Port], random: torch.Generator) -> list[Any]:
    """Return a random value for every input (see ``random_value``), or its fixed value."""
    return [random_value(port, random) if port.is_tensor else port.fixed for port in ports]


def random_value(port: Port, random: torch.Generator) -> torch.Tensor:
    """Return random pixels from 0 to 255 for an image; see ``random_tensor`` for other inputs."""
    if port.image is None:
        return random_tensor(port.dtype, port.shape, random)
    return random_tensor(torch.uint8, port.shape, random, high=BRIGHTEST).to(port.dtype)


def read_inputs(paths: Sequence[Path], ports: Sequence[Port]) -> list[Any]:
    """Read the inputs of a program.

    Args:
        paths: In the order of the inputs. A ``.npz`` holds several: by name if its names are the
            inputs', else in the stored order.
        ports: The program's inputs; inputs with a fixed value are not read.

    Raises:
        InputError: Files hold more, fewer or other inputs than the program has, or an input does
            not take an image.
        OptionError: A file cannot be read.
    """
    tensor_ports = [port for port in ports if port.is_tensor]
    named: dict[str, torch.Tensor] = {}
    for path in paths:
        remaining = [port for port in tensor_ports if port.name not in named]
        named |= dict(_read(path, remaining))
    missing = [port for port in tensor_ports if port.name not in named]
    if missing:
        raise InputError(
            "the files hold too few inputs",
            got=str(len(named)),
            expected=", ".join(f"{p.name} {describe(p.dtype, p.shape)}" for p in tensor_ports),
        )
    return [named[port.name] if port.is_tensor else port.fixed for port in ports]


def _read(path: Path, remaining: Sequence[Port]) -> Iterator[tuple[str, torch.Tensor]]:
    if not path.is_file():
        raise OptionError("no such input file", got=str(path))
    if path.suffix == _ARCHIVES:
        arrays = load_archive(path)
        names = {port.name for port in remaining}
        unknown = [name for name in arrays if name not in names]
        if unknown and len(unknown) < len(arrays):
            raise InputError(
                f"{path} names inputs that the program does not have, or that are given already",
                got=", ".join(unknown),
                expected=", ".join(port.name for port in remaining),
            )
        if unknown:
            _require(path, len(arrays), remaining)
            arrays = dict(zip((port.name for port in remaining), arrays.values(), strict=False))
        yield from ((name, to_tensor(path, array)) for name, array in arrays.items())
        return
    _require(path, 1, remaining)
    port = remaining[0]
    if path.suffix == _ARRAYS:
        yield port.name, to_tensor(path, load_array(path))
    elif path.suffix.lower() in images.SUFFIXES:
        if port.image is None:
            yield port.name, images.read_image(path, port.shape, port.dtype)
        else:
            yield port.name, images.read_picture(path, port.image, port.shape)
    else:
        raise OptionError("unknown kind of input file", got=str(path), expected=FORMATS)


def _require(path: Path, count: int, remaining: Sequence[Port]) -> None:
    if count > len(remaining):
        raise InputError(
            f"{path} holds more inputs than are left", got=str(count), expected=str(len(remaining))
        )


def load_array(path: Path) -> Any:
    """Read the array of a ``.npy``.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise OptionError(f"cannot read the array in {path}", got=str(error)) from error


def load_archive(path: Path) -> Mapping[str, Any]:
    """Read the arrays of a ``.npz`` by name.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise OptionError(f"cannot read the arrays in {path}", got=str(error)) from error


def to_tensor(path: Path, array: Any) -> torch.Tensor:
    """Convert an array of a file to a tensor.

    Raises:
        InputError: Torch does not have the element type.
    """
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise InputError(f"{path} holds no tensor", got=str(array.dtype)) from error
