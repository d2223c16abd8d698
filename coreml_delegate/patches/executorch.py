"""Private interfaces of ExecuTorch.

The store of named data and the operators of the edge dialect have no public names.
"""

from __future__ import annotations

import importlib
from typing import Any

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.dialects._ops import ops as exir_ops

from coreml_delegate.patches import PrivateInterface

__all__ = ["BACKEND_SEARCH", "NamedDataStore", "exir_ops", "hide_from_search"]

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
