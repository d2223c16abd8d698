"""Values shared by key for as long as they are referenced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _Slot(Generic[Value]):
    """The value of one key, and the lock to create it; ``users`` counts the threads in ``get``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    value: weakref.ref[Value] | None = None
    users: int = 0


class LiveValues(Generic[Value]):
    """A weak cache: one value for each key, shared by all callers while it is referenced.

    Concurrent calls with the same key wait for the first of them; different keys do not wait for
    each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[Hashable, _Slot[Value]] = {}

    def get(self, key: Hashable, create: Callable[[], Value]) -> Value:
        """Return the live value of ``key``, or ``create`` it; raises what ``create`` raises."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot[Value]())
            slot.users += 1
        try:
            with slot.lock:
                value = slot.value() if slot.value is not None else None
                if value is None:
                    value = create()
                    slot.value = weakref.ref(value)
                return value
        finally:
            with self._lock:
                slot.users -= 1
                self._slots = {
                    key: slot
                    for key, slot in self._slots.items()
                    if slot.users or (slot.value is not None and slot.value() is not None)
                }
