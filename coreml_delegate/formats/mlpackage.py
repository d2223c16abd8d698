"""The mlpackage: a folder with a manifest, a model specification and its weight files.

Files are a mapping of relative POSIX path to bytes, from a folder (memory-mapped) or from a blob.
Layout, with the manifest naming the root item::

    Manifest.json
    Data/com.apple.CoreML/model.mlmodel        protobuf, Model.proto
    Data/com.apple.CoreML/weights/weight.bin   optional

Source: coremltools' ``libmodelpackage`` (manifest version 1.0.0).
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.formats.blob import Buffer, Content

SUFFIX = ".mlpackage"
MANIFEST = "Manifest.json"
WEIGHTS = "weights"
"""Folder of the weight files, beside the specification."""
WEIGHT_FILE = "weight.bin"
MODEL_PATH = "@model_path/"
"""MIL's name of the specification's folder."""
MAIN = "main"
"""Name of the function of a model with one function."""

C = TypeVar("C", bound=Content)

_AUTHOR = "com.apple.CoreML"
_DATA = "Data"
_SPEC = f"{_AUTHOR}/model.mlmodel"
_WEIGHTS = f"{_AUTHOR}/{WEIGHTS}"
WEIGHTS_FOLDER = f"{_DATA}/{_WEIGHTS}"
"""Path of the weights folder in packages by ``assemble``."""
# Namespace of the identifiers derived from content; the value itself has no meaning.
_NAMESPACE = uuid.UUID("6f6d5f0e-3d0c-5d0b-9f0e-c0de1de1e9a7")


@dataclass(frozen=True, slots=True)
class PackageParts:
    """The parts of an mlpackage.

    Attributes:
        spec: Serialized ``Model`` message.
        weights: Path relative to the specification's folder (``@model_path`` in MIL) to content.
    """

    spec: memoryview
    weights: Mapping[str, memoryview]


def map_package(path: Path) -> dict[str, Buffer]:
    """Return the memory-mapped files of an mlpackage, or a package of a single specification.

    Args:
        path: An ``.mlpackage`` folder, or an ``.mlmodel`` file.

    Raises:
        ProgramError: No such package, or a compiled model.
        BlobFormatError: See ``map_folder``.
    """
    if path.suffix == ".mlmodelc":
        raise ProgramError(
            "a compiled model runs only in Core ML",
            got=str(path),
            expected="an mlpackage",
            remedy="Pass the package that it was compiled from",
        )
    if path.suffix == ".mlmodel" and not path.exists():
        raise ProgramError("no such model", got=str(path), expected="a file")
    if path.is_file():
        return {**assemble(path.read_bytes(), dict[str, bytes]())}
    return {**map_folder(path)}


def map_folder(folder: Path, *, smallest: int = 1) -> dict[str, memoryview]:
    """Map every file below ``folder`` into memory, read-only.

    Args:
        folder: Its files may be removed while they are mapped, but not changed.
        smallest: Size in bytes from which files are mapped; smaller files are read, because each
            mapped file counts as an open file.

    Returns:
        Relative POSIX path to content, sorted. The views keep the mappings alive.

    Raises:
        ProgramError: No such folder.
        BlobFormatError: A link in the folder leads out of it.
    """
    if not folder.is_dir():
        raise ProgramError("no such mlpackage", got=str(folder), expected="a folder")
    files: dict[str, memoryview] = {}
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not _inside(path, root):
            raise BlobFormatError(
                "a link leads out of the mlpackage",
                got=path.relative_to(folder).as_posix(),
                remedy="Copy the package with its links followed (cp -RL)",
            )
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _map_file(path, smallest)
    return files


def locate(files: Mapping[str, Buffer]) -> PackageParts:
    """Find the specification and weights through the manifest.

    Raises:
        BlobFormatError: The manifest is missing or malformed, or names a file that is not there.
    """
    spec_path = locate_spec(files)
    base = spec_path.rpartition("/")[0] + "/"
    weights = {
        path.removeprefix(base): memoryview(content)
        for path, content in files.items()
        if path.startswith(base) and path != spec_path
    }
    return PackageParts(spec=memoryview(files[spec_path]), weights=weights)


def locate_spec(files: Mapping[str, Buffer]) -> str:
    """Return the path of the specification, found through the manifest.

    Raises:
        BlobFormatError: As ``locate``.
    """
    _, path = _read_manifest(files)
    spec_path = f"{_DATA}/{path}"
    if spec_path not in files:
        raise BlobFormatError("mlpackage lacks its specification", expected=spec_path)
    return spec_path


def empty_folders(files: Mapping[str, Buffer]) -> list[str]:
    """Return the folders in the manifest of an mlpackage that have no files.

    Coremltools lists a folder of weights even if there are no weights, and refuses a package that
    lacks a listed folder.

    Raises:
        BlobFormatError: The manifest is missing or malformed.
    """
    items, _ = _read_manifest(files)
    paths = [f"{_DATA}/{item.get('path')}" for item in items.values() if isinstance(item, dict)]
    return [
        path
        for path in paths
        if not any(name == path or name.startswith(f"{path}/") for name in files)
        and not {"", ".", ".."} & set(path.split("/"))
    ]


def assemble(spec: bytes, weights: Mapping[str, C]) -> dict[str, bytes | C]:
    """Return the files of an mlpackage; equal arguments give equal bytes.

    Args:
        spec: Serialized ``Model`` message.
        weights: Relative path below the weights folder to content; may be empty.
    """
    files: dict[str, bytes | C] = {f"{_DATA}/{_SPEC}": spec}
    items = {_item_id(_SPEC): _item("CoreML Model Specification", "model.mlmodel", _SPEC)}
    if weights:
        items[_item_id(_WEIGHTS)] = _item("CoreML Model Weights", "weights", _WEIGHTS)
        files |= {f"{WEIGHTS_FOLDER}/{name}": content for name, content in weights.items()}
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": items,
        "rootModelIdentifier": _item_id(_SPEC),
    }
    files[MANIFEST] = (json.dumps(manifest, indent=4, sort_keys=True) + "\n").encode()
    return dict(sorted(files.items()))


def _inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # a dangling link, or a cycle
        return False


def _map_file(path: Path, smallest: int) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < max(1, smallest):  # an empty file cannot be mapped
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_manifest(files: Mapping[str, Buffer]) -> tuple[Mapping[str, Any], str]:
    """Return the items of the manifest, and the path of the specification."""
    if MANIFEST not in files:
        raise BlobFormatError("mlpackage lacks its manifest", expected=MANIFEST)
    try:
        manifest = json.loads(bytes(files[MANIFEST]))
        items: Any = manifest["itemInfoEntries"]
        path: Any = items[manifest["rootModelIdentifier"]]["path"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BlobFormatError("malformed mlpackage manifest", got=str(error)) from error
    if not isinstance(path, str) or not isinstance(items, dict):
        raise BlobFormatError("malformed mlpackage manifest", got=f"path {path!r}")
    return items, path


def _item_id(path: str) -> str:
    # Identifiers need only be unique inside one manifest; the path makes them so.
    return str(uuid.uuid5(_NAMESPACE, path)).upper()


def _item(description: str, name: str, path: str) -> dict[str, str]:
    return {"author": _AUTHOR, "description": description, "name": name, "path": path}
