"""One compilation for everyone who asks for the same thing at the same time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Made = TypeVar("Made")


@dataclass(slots=True)
class _Place(Generic[Made]):
    """Where one thing is made; ``users`` counts the threads at it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: weakref.ref[Made] | None = None
    users: int = 0


class Sharing(Generic[Made]):
    """What is made for a key is given to all who ask for that key for as long as anyone holds it.

    Threads that ask for one key at the same time wait for the first of them; different keys do not
    wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[Hashable, _Place[Made]] = {}

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The thing of ``key``, made by ``make`` if nobody holds it; raises what that raises."""
        with self._lock:
            place = self._places.setdefault(key, _Place[Made]())
            place.users += 1
        try:
            with place.lock:
                found = place.made() if place.made is not None else None
                if found is None:
                    found = make()
                    place.made = weakref.ref(found)
                return found
        finally:
            with self._lock:
                place.users -= 1
                self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        abandoned = [
            key
            for key, place in self._places.items()
            if not place.users and (place.made is None or place.made() is None)
        ]
        for key in abandoned:
            del self._places[key]
