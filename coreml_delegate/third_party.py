"""Other people's code: importing it quietly, and reporting what it prints and raises.

On anything but macOS the import of coremltools warns about missing native proxies, and everywhere
about versions of torch and scikit-learn it was not tested with; none of that concerns a user of
this package. Exactly those messages are dropped, during the import only.

Core ML's protobuf messages are had without the seconds that ``import coremltools`` takes. The
generated modules in the coremltools wheel need only protobuf, but importing them by their own name
runs ``coremltools/__init__``, which loads every converter. Under an alias they load in about a
tenth of a second; protobuf keeps one class per message, so they are coremltools' own classes.

Transformers imports torchvision, whose wheel for CUDA cannot be imported beside a torch for CPUs.
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

# logger -> messages of its import that are dropped
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
    "dask": "cluster",
    "distributed": "cluster",
    "jax": "jax",
    "jaxlib": "jax",
    "safetensors": "llm",
    "sklearn": "demo",
    "tokenizers": "llm",
    "torchvision": "vision",
    "transformers": "llm",
}
"""Import name of each optional package -> the extra of this project that installs it."""


def missing_extra(error: BaseException) -> OptionError | None:
    """Return an error that names the extra to install, if an optional package was not found."""
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
    """The ``coremltools`` module, imported without noise."""
    with quiet_import(), _leaving_out(_LEFT_OUT["coremltools"]):
        return importlib.import_module("coremltools")


_LEFT_OUT: dict[str, tuple[str, ...]] = {"coremltools": (), "transformers": ()}


def leave_out_unused_packages() -> None:
    """Let later imports of coremltools and transformers skip optional packages that we do not use.

    Coremltools imports every package whose models it can convert: two seconds for scikit-learn and
    transformers. Transformers imports scipy for the losses of detectors: 0.2 s and 30 MB. Both
    then lack those features for the rest of the process, so call this in the project's own commands
    alone. Other code can still import the skipped packages afterwards.
    """
    _LEFT_OUT["coremltools"] = ("libsvm", "sklearn", "tensorflow", "transformers", "xgboost")
    _LEFT_OUT["transformers"] = ("scipy",)


@contextmanager
def _leaving_out(names: Iterable[str]) -> Generator[None]:
    """Let packages that are not imported yet look as if they were not installed."""
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
    filters = [(logging.getLogger(name), _Drop(patterns)) for name, patterns in _NOISE.items()]
    for logger, drop in filters:
        logger.addFilter(drop)
    try:
        with warnings.catch_warnings():
            # Their own deprecation notices, raised by importing them.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.filterwarnings("ignore", "This API is experimental and subject to change")
            yield
    finally:
        for logger, drop in filters:
            logger.removeFilter(drop)


class _Drop(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None


@contextmanager
def without_kernel_advice() -> Generator[None]:
    """Drop what transformers says of faster kernels for other devices."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    drop = _Drop((r"`\w+` is falling back to its reference PyTorch implementation",))
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


@cache
def transformers() -> Any:
    """The ``transformers`` module, with what its language models import, imported without noise.

    Raises:
        OptionError: Transformers is not installed.
    """
    with quiet_import(), torchvision_importable(), _leaving_out(_LEFT_OUT["transformers"]):
        module = import_optional("transformers")
        importlib.import_module("transformers.modeling_utils")
        return module


@contextmanager
def torchvision_importable() -> Generator[None]:
    """Make torchvision importable next to a CPU-only torch, for all imports in this block.

    A wheel built for CUDA cannot load its operators there, and its Python code then fails because
    the operators it refers to are not declared. Only in that case they are declared here; no model
    outside ``torchvision.models.detection`` calls them. Models of other libraries import
    torchvision too, those of transformers for example.
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
        del target  # which is for reloading
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchvisionLoader(spec, spec.loader)
        return spec


class _TorchvisionLoader(Loader):
    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module by its own loader, which it keeps from then on."""
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
    # Cached, because the declarations vanish with the object.
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


@cache
def _proto_package() -> str:
    """Import coremltools' package of generated modules under the alias; return the alias."""
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
    """``coremltools.proto.Model_pb2``."""
    return importlib.import_module(f"{_proto_package()}.Model_pb2")


def mil_pb2() -> ModuleType:
    """``coremltools.proto.MIL_pb2``."""
    return importlib.import_module(f"{_proto_package()}.MIL_pb2")


def feature_types_pb2() -> ModuleType:
    """``coremltools.proto.FeatureTypes_pb2``."""
    return importlib.import_module(f"{_proto_package()}.FeatureTypes_pb2")


def describe_error(error: Exception) -> str:
    """Return the class and the first line of a foreign exception, whose message may be a page long.

    If the first line announces a list, the list's first item is added.
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    items = [line for line in others if line.startswith(_ITEM)]
    told = [first, *(items or (others if first.endswith(":") else []))[:1]]
    told_in_one = " ".join(told).rstrip(".")
    return f"{type(error).__name__}: {told_in_one}" if first else type(error).__name__


@contextmanager
def log_prints() -> Generator[None]:
    """Log what foreign code prints meanwhile, on either stream, at DEBUG."""
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
    """Replace whatever foreign code raises by one line that says whose failure it is.

    Args:
        what: The failure.
        remedy_of: Returns what the user can do about an exception, or None.
        kind: Class of the error raised instead.

    Raises:
        CoreMLDelegateError: Of the class ``kind``; errors of this package pass unchanged.
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
