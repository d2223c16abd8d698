"""Private interfaces of ExecuTorch.

The store of named data, the operators of the edge dialect and the cache of compared nodes have no
public names.
"""

from __future__ import annotations

import importlib
from typing import Any

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.utils import is_same_node
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects._ops import ops as exir_ops
from torch._subclasses.fake_tensor import FakeTensorMode

from coreml_delegate.patches import PrivateInterface

__all__ = ["BACKEND_SEARCH", "NamedDataStore", "exir_ops", "forget_lowered", "hide_from_search"]

_LIBRARY = "executorch"
_VERSIONS = ("1.5",)

BACKEND_SEARCH = PrivateInterface(
    name="the subclasses of BackendDetails",
    reason=(
        "to_backend searches them by class name, takes the first match on one path and the last "
        "on the other, and does so after the partitioner has returned; a DelegationSpec has only "
        "a name, which the .pte repeats for the device"
    ),
    library=_LIBRARY,
    versions=_VERSIONS,
)

KEPT_PROGRAMS = PrivateInterface(
    name="caches with the nodes of lowered programs",
    reason=(
        "ExecuTorch caches comparisons of nodes, and torch the results of calls of delegates, both "
        "without a limit, so that the weights of every lowered program stay in memory"
    ),
    library=_LIBRARY,
    versions=_VERSIONS,
)


def forget_lowered() -> None:
    """Free the programs that were lowered before; see ``KEPT_PROGRAMS``.

    Only speed depends on what is removed. The last program stays, since ExecuTorch compares its
    nodes after the partitioner has returned.
    """
    KEPT_PROGRAMS.check()
    is_same_node.cache_clear()
    for key in list(FakeTensorMode.cache):
        if key.key[0] is executorch_call_delegate:
            FakeTensorMode.cache.pop(key, None)


def hide_from_search(name: str, *, keep: type[Any], base: type[Any]) -> None:
    """Hide other backends of one name from ExecuTorch's search; see ``BACKEND_SEARCH``.

    ExecuTorch searches the direct subclasses of ``BackendDetails``. The other backends get a class
    in between, which holds for all threads: no block of ours is open during the search.

    Args:
        name: The class name of the backends.
        keep: The backend that stays.
        base: The class in between, a subclass of ``BackendDetails``.
    """
    details: Any = importlib.import_module("executorch.exir.backend.backend_details")
    backends: list[Any] = [
        backend
        for backend in details.BackendDetails.__subclasses__()
        if backend.__name__ == name and backend is not keep
    ]
    for backend in backends:
        BACKEND_SEARCH.check()
        backend.__bases__ = tuple(
            base if b is details.BackendDetails else b for b in backend.__bases__
        )
