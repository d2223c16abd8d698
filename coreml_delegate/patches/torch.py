"""Patches of torch, and its private interfaces that several modules use.

Classes of operators, fake tensors and containers have no public names; torch is imported already
where they are used.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._export.verifier import SpecViolationError, load_verifier
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from coreml_delegate.patches import Patch

__all__ = [
    "SKIP_GUARD_CODE",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SpecViolationError",
    "TorchDispatchMode",
    "all_schemas",
    "detect_fake_mode",
    "drop_pending_sizes",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "load_verifier",
    "name_container",
    "pytree",
    "quiet_loggers",
    "real_by_fake",
    "replace_in_signature",
    "schema_of",
    "set_parts",
    "share_memory",
    "with_parts",
    "wrapped_kernels",
]

_KERNEL_LOCK = threading.RLock()


def _no_guard_code(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    del original
    return lambda graph_module: []  # noqa: ARG005 - torch passes it


SKIP_GUARD_CODE = Patch(
    owner=lambda: importlib.import_module("torch.export.exported_program"),
    name="_convert_guards_to_code",
    replacement=_no_guard_code,
    reason=(
        "every new ExportedProgram prints the guards of dynamic shapes as code, which only its "
        "module() reads: 10 s of 42 s to lower two stages of Swin V2 with dynamic height and width"
    ),
    issue=None,
    library="torch",
    versions=("2.13",),
)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator, ``torch.FunctionSchema``; None for other callables.

    No public function returns it.
    """
    return getattr(operator, "_schema", None)


def all_schemas() -> list[Any]:
    """Return the schemas, ``torch.FunctionSchema``, of all registered operators."""
    private: Any = torch
    return private._C._jit_get_all_schemas()


@contextmanager
def quiet_loggers() -> Generator[None]:
    """Silence torch's loggers, which have handlers of their own on stderr."""
    private: Any = importlib.import_module("torch._logging._internal")
    private.set_logs(all=logging.CRITICAL)
    try:
        yield
    finally:
        private.set_logs()


def real_by_fake(mode: Any) -> dict[int, torch.Tensor]:
    """Return the real tensors that a ``FakeTensorMode`` knows, by the identity of their fakes."""
    converter = mode.fake_tensor_converter.meta_converter
    fakes = converter.tensor_memo
    return {
        id(fake): real
        for real, number in converter.describer.lookup_tensor.items()
        if (fake := fakes.get(number)) is not None and isinstance(real, torch.Tensor)
    }


def drop_pending_sizes(mode: Any) -> None:
    """Forget the sizes that depend on values, of earlier traces, which no graph has taken.

    Torch would look for them in the graph that is traced next, and fail.

    Args:
        mode: The ``FakeTensorMode`` of a program.
    """
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are views of one memory, also if they have no data.

    No public function tells it of meta tensors.
    """
    storages: list[Any] = [tensor.untyped_storage() for tensor in (first, second)]
    return storages[0]._cdata == storages[1]._cdata


def with_parts(program: ExportedProgram, **parts: Any) -> ExportedProgram:
    """Return a shallow copy of a program with other parts; see ``set_parts``."""
    changed = copy.copy(program)
    set_parts(changed, parts)
    return changed


def set_parts(program: ExportedProgram, parts: Mapping[str, Any]) -> None:
    """Set parts of a program, whose properties are read-only.

    A new ``ExportedProgram`` would print its guards and be verified again.

    Args:
        program: Changed.
        parts: By the names of the properties, as ``graph_signature``.
    """
    for name, value in parts.items():
        setattr(program, f"_{name}", value)


def replace_in_signature(
    module: GraphModule, program: ExportedProgram
) -> AbstractContextManager[Any]:
    """Rename results in the signature of a program as nodes of its graph are replaced.

    No public function of ``GraphModule`` sets its hook.

    Args:
        module: The graph module of the program, or a copy.
        program: Its signature is changed while the context is open.
    """
    hooked: Any = module
    return hooked._set_replace_hook(program.graph_signature.get_replace_hook())


@contextmanager
def wrapped_kernels(ops: Iterable[OpOverload], wrap: Callable[[Any], Any]) -> Generator[None]:
    """Wrap the Python kernels of operators in this thread.

    All threads share the tables of kernels, and there is no public way to replace a kernel and to
    restore it.

    Args:
        ops: The operators.
        wrap: Takes a kernel, and returns the function to call in its place.
    """
    thread = threading.get_ident()
    with _KERNEL_LOCK:
        tables: list[tuple[Any, dict[Any, Any]]] = [(op, dict(_kernels(op))) for op in ops]
        try:
            for op, kernels in tables:
                wrapped = {
                    key: _in_thread(thread, wrap(kernel), kernel) for key, kernel in kernels.items()
                }
                _set_kernels(op, wrapped)
            yield
        finally:
            for op, kernels in tables:
                _set_kernels(op, kernels)


def _in_thread(thread: int, wrapped: Any, kernel: Any) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*arguments: Any, **keywords: Any) -> Any:
        function = wrapped if threading.get_ident() == thread else kernel
        return function(*arguments, **keywords)

    return call


def _kernels(op: Any) -> dict[Any, Any]:
    return op.py_kernels


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    _kernels(op).clear()
    _kernels(op).update(kernels)
    op._dispatch_cache.clear()


def name_container(kind: type[Any], name: str) -> None:
    """Name a container that torch takes apart but cannot save, for the whole process.

    Containers are named as they are registered, and torch registers its own without names.

    Args:
        kind: Unchanged if torch does not know it, or if it has a name.
        name: In the file of ``torch.export.save``.
    """
    tree: Any = pytree
    definition = tree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    unnamed = tree.NO_SERIALIZED_TYPE_NAME_FOUND
    if definition is not None and definition.serialized_type_name == unnamed:
        tree.SUPPORTED_SERIALIZED_TYPES[kind] = definition._replace(serialized_type_name=name)
        tree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind
