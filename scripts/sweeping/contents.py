"""The content that a job reads: digests of files, and versions of the software that computes.

The files of a Python module are its own and the files of all modules that its import statements
lead to; the statements are parsed, not run. Of modules in the folder of the sweep's file all files
count; of an installed package, only its own modules. Other installed packages that they import
count by their versions. Imports by other means, such as ``importlib``, are not seen.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Final

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.caches import software, version_of
from coreml_delegate.scripts.arguments import MODEL_LIBRARIES
from coreml_delegate.scripts.sweeping.jobs import CONFIG_SUFFIX, Job

_DISTRIBUTIONS: Final = (
    "coremltools",
    "executorch",
    "numpy",
    "openvino",
    "timm",
    "torch",
    "torchao",
    "torchvision",
)
_OWN: Final = "coreml_delegate"
_PYTHON: Final = ".py"


def environment() -> Mapping[str, str]:
    """Return the versions of the software that computes a result, and this package's digest."""
    return software(_OWN, *_DISTRIBUTIONS)


@functools.cache
def machine() -> str:
    """Return the processor of this machine and the number of usable cores."""
    from coreml_delegate.runtime.machine import processor  # imports torch, as the next
    from coreml_delegate.runtime.threads import cpu_count

    return f"{processor() or platform.machine()}, {cpu_count()} cores"


@dataclass(frozen=True, slots=True)
class Input:
    """The content behind one value of a job.

    Attributes:
        files: The files of a module, by path relative to ``root``; or one file or folder, by its
            last name.
        root: The folder that modules are imported from; None for a path.
        versions: Versions of the installed packages that the files import, by distribution.
    """

    files: Mapping[str, Path]
    root: Path | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def digests(self) -> list[str]:
        """Return digests of the contents; the name of a path does not count."""
        if self.root is None:
            return [digest(path) for path in self.files.values()]
        files = [f"{name} {digest(path)}" for name, path in self.files.items()]
        return files + [f"{name} {version}" for name, version in self.versions.items()]


def read_by(job: Job, folder: Path) -> dict[str, Input]:
    """Return the inputs of a job, by the attribute of model or options that names each.

    Raises:
        OptionError: A file does not exist.
    """
    model = job.model
    values = {name: getattr(model, name) for name in ("source", "weights", "calibration", "data")}
    if job.options.quantize.endswith(CONFIG_SUFFIX):
        values["quantize"] = job.options.quantize
    return {
        name: content
        for name, value in values.items()
        if value is not None and (content := _input(value, folder)).files
    }


def with_paths(job: Job, paths: Mapping[str, str]) -> Job:
    """Return the job with other paths, by the attribute of model or options."""
    of_model = {name: path for name, path in paths.items() if name != "quantize"}
    of_options = {name: path for name, path in paths.items() if name == "quantize"}
    return replace(
        job,
        model=replace(job.model, **of_model),
        options=replace(job.options, **of_options),
    )


def key(job: Job, folder: Path) -> str:
    """Return the digest of all that a job's result depends on: 64 hexadecimal digits.

    Names of jobs and models do not count, nor where files are.

    Raises:
        OptionError: A file that the job reads does not exist.
    """
    inputs = read_by(job, folder)
    job = with_paths(job, {name: "" for name, content in inputs.items() if content.root is None})
    document = {
        "model": asdict(job.model),
        "options": asdict(job.options),
        "contents": {name: content.digests() for name, content in inputs.items()},
        "environment": environment(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> str:
    """Return a digest of a file, or of all files below a folder with their names."""
    if path.is_dir():
        total = hashlib.sha256()
        for file in files_below(path):
            total.update(f"{file.relative_to(path).as_posix()}\0{digest(file)}\n".encode())
        return total.hexdigest()
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _digest(path: Path, _size: int, _changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder in order, hidden ones left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )


def _input(value: str, folder: Path) -> Input:
    """Return the content of ``MODULE:NAME``, a file or a folder."""
    module, separator, name = value.partition(":")
    if (folder / value).exists() or not (separator and name):
        path = _existing(value, folder)
        return Input({path.name: path})
    if module in MODEL_LIBRARIES:
        return Input({})
    root, follows = _root(module, folder)
    files, packages = module_files(root, module, inside=follows)
    named = {path.relative_to(root).as_posix(): path for path in files}
    return Input(named, root, _versions_of(packages))


def _existing(value: str, folder: Path) -> Path:
    path = folder / value
    if not path.exists():
        raise OptionError("no such file or folder", got=value, expected=f"a path from {folder}")
    return path


def _root(module: str, folder: Path) -> tuple[Path, str]:
    """Return the folder that a module is imported from, and the package to remain in."""
    top = module.partition(".")[0]
    if _located(folder, module):
        return folder, ""
    spec = PathFinder.find_spec(top, [path for path in sys.path if path])
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        raise OptionError("no such Python module", got=repr(module), expected=f"one in {folder}")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent, top
    return Path(str(spec.origin)).parent, top


def _versions_of(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of the distributions that installed ``packages``."""
    installed = _distributions()
    names = {name for package in packages for name in installed.get(package, ())}
    return {name: version_of(name) for name in sorted(names)}


@functools.cache
def _distributions() -> Mapping[str, Sequence[str]]:
    return importlib.metadata.packages_distributions()


def module_files(root: Path, module: str, *, inside: str = "") -> tuple[list[Path], set[str]]:
    """Follow the direct and indirect imports of a module below a folder.

    Args:
        root: Folder that modules are imported from.
        module: Full name of the first module.
        inside: Package outside of which imports are not followed; empty to follow all.

    Returns:
        The files of the module and of the modules that it imports, and the names of the packages
        that are imported from elsewhere.
    """
    files: dict[Path, None] = {}
    elsewhere: set[str] = set()
    waiting = [module]
    seen = set(waiting)
    while waiting:
        imported_module = waiting.pop()
        located = _located(root, imported_module)
        if not located:
            elsewhere.add(imported_module.partition(".")[0])
        for name, path in located:
            if path in files:
                continue
            files[path] = None
            package = name if path.name == f"__init__{_PYTHON}" else name.rpartition(".")[0]
            for imported in _imports(path, package):
                if inside and not f"{imported}.".startswith(f"{inside}."):
                    elsewhere.add(imported.partition(".")[0])
                elif imported not in seen:
                    seen.add(imported)
                    waiting.append(imported)
    return sorted(files), elsewhere


def _located(root: Path, module: str) -> list[tuple[str, Path]]:
    """Return the files that importing a module runs, with the names of their modules."""
    files: list[tuple[str, Path]] = []
    path, name = root, ""
    for part in module.split("."):
        name = f"{name}.{part}".removeprefix(".")
        if (path / part).is_dir():
            path /= part
            initial = path / f"__init__{_PYTHON}"
            files += [(name, initial)] if initial.is_file() else []
        elif (file := path / f"{part}{_PYTHON}").is_file():
            return [*files, (name, file)]
        else:
            break
    return files


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the modules that the import statements of a file may name."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"{path} is no Python module", got=str(error)) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = parts[: len(parts) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}".removeprefix(".") for alias in node.names)
