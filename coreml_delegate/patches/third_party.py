"""Quiet imports of optional dependencies, and translation of their output and errors.

Except on macOS the import of coremltools warns about missing native proxies, and everywhere about
untested versions of torch and scikit-learn, which does not concern a user of this package. Only
these messages are dropped, and only during the import.

Core ML's protobuf messages are imported without the seconds that ``import coremltools`` takes. The
generated modules in the coremltools wheel need only protobuf, but an import by their own name runs
``coremltools/__init__``, which loads every converter. Under an alias they load in about 0.1 s;
protobuf has one class per message, so these are coremltools' own classes.

Transformers imports torchvision, whose CUDA wheel cannot be imported with a CPU-only torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from coreml_delegate.errors import CoreMLDelegateError, EngineUnavailableError, OptionError

logger = logging.getLogger(__name__)

_PROTO_ALIAS = "_coreml_delegate_proto"
_ITEM = "- "
_MISSING_OPS = "operator torchvision::nms does not exist"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Logger -> messages to drop during the import.
_NOISE = {
    "coremltools": (
        r"Failed to load _ML\w+: No module named 'coremltools\.libcoremlpython'",
        r"Fail to import Blob(Reader|Writer) from libmilstoragepython",
        r"(scikit-learn version|Torch version) \S+ (is not supported|has not been tested)",
    ),
    "torchao": (r"Failed to load \S+\.so",),
    "torchao.kernel.intmm": (r"Warning: Detected no triton",),
    "torch.utils._pytree": (r"<enum '\w+'> is an Enum subclass and is now natively supported",),
}


_EXTRAS = {
    "PIL": "vision",
    "accelerate": "gguf",
    "dask": "cluster",
    "distributed": "cluster",
    "gguf": "gguf",
    "jax": "jax",
    "jaxlib": "jax",
    "llguidance": "grammar",
    "safetensors": "llm",
    "sklearn": "demo",
    "timm": "timm",
    "tokenizers": "llm",
    "torchvision": "vision",
    "transformers": "llm",
}
"""Extra of this project by import name of an optional package."""


def missing_extra(error: BaseException) -> OptionError | None:
    """Return an error that names the extra to install, or None for another error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return OptionError(
        f"the Python package {package} is not installed",
        remedy=f"pip install 'coreml-delegate[{_EXTRAS[package]}]'",
    )


def import_optional(name: str) -> Any:
    """Import a module of an optional package.

    Raises:
        OptionError: The package is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from None


@cache
def coremltools() -> Any:
    """Import ``coremltools`` without its warnings."""
    with quiet_import(), _hidden(_HIDDEN["coremltools"]):
        return importlib.import_module("coremltools")


_HIDDEN: dict[str, tuple[str, ...]] = {"coremltools": (), "transformers": ()}
"""Packages that the import of a library does not see."""


def leave_out_unused_packages() -> None:
    """Make later imports of coremltools and transformers skip packages that we do not use.

    Coremltools imports every package whose models it can convert: two seconds for scikit-learn and
    transformers. Transformers imports scipy for the losses of detectors: 0.2 s and 30 MB. Both lack
    these features for the rest of the process, so call this only in the project's own commands.
    Other code can still import the skipped packages afterwards.
    """
    _HIDDEN["coremltools"] = ("libsvm", "sklearn", "tensorflow", "transformers", "xgboost")
    _HIDDEN["transformers"] = ("scipy",)


@contextmanager
def _hidden(names: Iterable[str]) -> Generator[None]:
    """Make packages appear as not installed, unless they are imported already."""
    modules: dict[str, Any] = sys.modules
    absent = [name for name in names if name not in modules]
    modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for name in absent:
            del modules[name]


@contextmanager
def quiet_import() -> Generator[None]:
    """Drop the known import-time messages of coremltools and torchao."""
    filters = [
        (logging.getLogger(name), _DropFilter(patterns)) for name, patterns in _NOISE.items()
    ]
    for logger, drop in filters:
        logger.addFilter(drop)
    try:
        with warnings.catch_warnings():
            # Deprecation warnings of their own imports.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.filterwarnings("ignore", "This API is experimental and subject to change")
            yield
    finally:
        for logger, drop in filters:
            logger.removeFilter(drop)


class _DropFilter(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None


@contextmanager
def without_kernel_advice() -> Generator[None]:
    """Drop messages of transformers about faster kernels for other devices."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    drop = _DropFilter((r"`\w+` is falling back to its reference PyTorch implementation",))
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


@cache
def transformers() -> Any:
    """Import ``transformers`` and the modules of its language models without warnings.

    Raises:
        OptionError: Transformers is not installed.
    """
    with quiet_import(), torchvision_importable(), _hidden(_HIDDEN["transformers"]):
        module = import_optional("transformers")
        importlib.import_module("transformers.modeling_utils")
        return module


@contextmanager
def torchvision_importable() -> Generator[None]:
    """Make torchvision importable with a CPU-only torch, for all imports in this block.

    A CUDA wheel cannot load its operators there, and its Python code then fails because it refers
    to undeclared operators. Only in that case they are declared here; no model outside
    ``torchvision.models.detection`` calls them. Models of other libraries, transformers for
    example, import torchvision too.
    """
    finder = _TorchvisionFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torchvision, with a loader that declares its operators if necessary."""
        del target  # only for reloading
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchvisionLoader(spec, spec.loader)
        return spec


class _TorchvisionLoader(Loader):
    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader, and restore that loader."""
        self._spec.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if _MISSING_OPS not in str(error):
                raise
            _declare_operators()
            self._loader.exec_module(module)


@cache
def _declare_operators() -> Any:
    # Cached, because the declarations are deleted with the object.
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


@cache
def _proto_package() -> str:
    """Import coremltools' package of generated modules under an alias; return the alias."""
    spec = importlib.util.find_spec("coremltools")
    if spec is None or not spec.submodule_search_locations:
        raise EngineUnavailableError(
            "coremltools is not installed", remedy="Install it: pip install coremltools==9.0"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "proto"
    alias = importlib.util.spec_from_file_location(
        _PROTO_ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if alias is None or alias.loader is None:
        raise EngineUnavailableError("coremltools has no proto package", got=str(folder))
    module = importlib.util.module_from_spec(alias)
    sys.modules[_PROTO_ALIAS] = module
    alias.loader.exec_module(module)
    return _PROTO_ALIAS


def model_pb2() -> ModuleType:
    """Import ``coremltools.proto.Model_pb2``."""
    return importlib.import_module(f"{_proto_package()}.Model_pb2")


def mil_pb2() -> ModuleType:
    """Import ``coremltools.proto.MIL_pb2``."""
    return importlib.import_module(f"{_proto_package()}.MIL_pb2")


def feature_types_pb2() -> ModuleType:
    """Import ``coremltools.proto.FeatureTypes_pb2``."""
    return importlib.import_module(f"{_proto_package()}.FeatureTypes_pb2")


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an exception with a long message.

    If the first line introduces a list, the first item is included.
    """
    first, *lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    items = [line for line in lines if line.startswith(_ITEM)]
    parts = [first, *(items or (lines if first.endswith(":") else []))[:1]]
    summary = " ".join(parts).rstrip(".")
    return f"{type(error).__name__}: {summary}" if first else type(error).__name__


@contextmanager
def log_prints() -> Generator[None]:
    """Log the output of other code in this block, on both streams, at DEBUG."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
    finally:
        if printed.getvalue():
            logger.debug("printed meanwhile: %s", printed.getvalue())


@contextmanager
def wrap_errors(
    what: str,
    remedy_of: Callable[[Exception], str | None] = lambda _: None,
    *,
    kind: type[CoreMLDelegateError] = OptionError,
) -> Generator[None]:
    """Replace the exceptions of other libraries by an error with a one-line message.

    Args:
        what: The failure.
        remedy_of: Returns the remedy for an exception, or None.
        kind: Class of the new error.

    Raises:
        CoreMLDelegateError: An error of class ``kind``; errors of this package pass unchanged.
        OptionError: An optional package is not installed.
    """
    try:
        with log_prints():
            yield
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise (
            missing_extra(error) or kind(what, got=describe_error(error), remedy=remedy_of(error))
        ) from error
