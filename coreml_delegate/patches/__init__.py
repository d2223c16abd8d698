"""Changes to other libraries, one module per library.

A ``Patch`` replaces an attribute of a library. It holds while a ``patched`` block runs, in the
thread of that block only: other threads call the original. Private interfaces that are only read
stand in the same modules. A test of each patch fails once its library needs the patch no more.
"""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """A callable attribute of a library that is replaced.

    Attributes:
        owner: Returns the module, class or object; it imports the library.
        name: The attribute, a function, method, static method or class; or a builtin that the
            owner, a module, calls by this name.
        replacement: Takes the original and returns the function to call in its place. If
            ``with_state`` was used, takes the state before the original.
        reason: Why, in one sentence.
        issue: Address of the report, or None if none is known.
        library: Name of the distribution.
        versions: Releases that the patch was tested with, as "9.0"; they include "9.0.1".
    """

    owner: Callable[[], Any]
    name: str
    replacement: Callable[..., Any]
    reason: str
    issue: str | None
    library: str
    versions: tuple[str, ...]

    def with_state(self, state: Any) -> Patch:
        """Return the patch with a first argument for ``replacement``, as a list to append to."""
        return replace(self, replacement=functools.partial(self.replacement, state))


@dataclass(frozen=True, slots=True)
class PrivateInterface:
    """A private interface of a library that this package uses.

    Attributes:
        name: Of the interface.
        reason: Why no public interface does, in one sentence.
        library: Name of the distribution.
        versions: Releases that it was tested with, as "9.0"; they include "9.0.1".
    """

    name: str
    reason: str
    library: str
    versions: tuple[str, ...]

    def check(self) -> None:
        """Log a warning, once, if the installed release was not tested."""
        _check_version(f"use of {self.name}", self.library, self.versions)


@dataclass(slots=True)
class _Slot:
    """A patched attribute.

    Attributes:
        stored: The attribute as it stands in its owner, perhaps a ``staticmethod`` or None;
            ``_ABSENT`` for a builtin, which the owner lacks.
        original: The attribute as it is called.
        by_thread: Replacements by thread, innermost last.
    """

    stored: Any
    original: Callable[..., Any]
    by_thread: dict[int, list[Callable[..., Any]]] = field(default_factory=dict[int, list[Any]])

    def current(self) -> Callable[..., Any]:
        """Return the function that the attribute is in this thread."""
        replacements = self.by_thread.get(threading.get_ident())
        return replacements[-1] if replacements else self.original


_SLOTS: dict[tuple[int, str], _Slot] = {}


@contextmanager
def patched(*patches: Patch) -> Generator[None]:
    """Apply patches in this thread, the first one first.

    A release of a library that a patch was not tested with is logged as a warning, once.
    """
    with ExitStack() as stack:
        for patch in patches:
            _check_version(f"patch of {patch.name}", patch.library, patch.versions)
            stack.enter_context(_applied(patch))
        yield


@contextmanager
def _applied(patch: Patch) -> Generator[None]:
    owner, thread = patch.owner(), threading.get_ident()
    key = id(owner), patch.name
    with _LOCK:
        slot = _SLOTS.get(key)
        if slot is None:
            stored = vars(owner).get(patch.name, _ABSENT)
            original = getattr(builtins if stored is _ABSENT else owner, patch.name)
            slot = _Slot(stored, original)
            _SLOTS[key] = slot
            setattr(owner, patch.name, _dispatcher(slot))
        replacements = slot.by_thread.setdefault(thread, [])
        replacements.append(patch.replacement(slot.current()))
    try:
        yield
    finally:
        with _LOCK:
            replacements.pop()
            if not replacements:
                del slot.by_thread[thread]
            if not slot.by_thread:
                _restore(owner, patch.name, slot.stored)
                del _SLOTS[key]


def _restore(owner: Any, name: str, stored: Any) -> None:
    if stored is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, stored)


def _dispatcher(slot: _Slot) -> Any:
    """Return a function that calls the replacement of the calling thread, or the original."""

    def dispatch(*arguments: Any, **keywords: Any) -> Any:
        return slot.current()(*arguments, **keywords)

    is_bound = isinstance(slot.stored, staticmethod | classmethod)
    return staticmethod(dispatch) if is_bound else dispatch


@functools.cache
def _check_version(change: str, library: str, versions: tuple[str, ...]) -> None:
    """Warn if the installed release of a library is not a tested one."""
    installed = importlib.metadata.version(library)
    release = installed.partition("+")[0]
    if not any(f"{release}.".startswith(f"{version}.") for version in versions):
        _LOGGER.warning(
            "the %s was tested with %s %s, not with %s",
            change,
            library,
            ", ".join(versions),
            installed,
        )
