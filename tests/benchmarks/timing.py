"""Medians of calls that take turns, so that a disturbance of the machine falls on all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_WARM_UP = 3  # rounds
# Before a turn: threads of other contenders stop spinning. ResNet-18 took 29 ms instead of 18 right
# after a call of ONNX Runtime, whose threads wait for the next one at full speed.
_PAUSE_SECONDS = 0.02
# A call shorter than this is timed as a burst: the clock and the loop are not free.
_BURST_SECONDS = 2e-3
_MOST_IN_A_BURST = 50


@dataclass(frozen=True, slots=True)
class Turn:
    """A contender of a race.

    Attributes:
        call: What is timed.
        share: Rounds it takes part in, of all.
    """

    call: Callable[[], Any]
    share: float = 1.0


def race(turns: Mapping[str, Turn], rounds: int) -> dict[str, float]:
    """Median seconds per call of each, by name.

    Every round times each once, in an order drawn anew, after a pause and one call that is not
    timed: others have used the caches and the cores since.

    Args:
        turns: By name.
        rounds: How many are timed, at least one.
    """
    order = list(turns)
    draw = random.Random(0)
    warm = {
        name: min(_timed(turn.call, 1) for _ in range(_WARM_UP)) for name, turn in turns.items()
    }
    repeats = {name: _repeats(seconds) for name, seconds in warm.items()}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(rounds):
        draw.shuffle(order)
        for name in order:
            if len(times[name]) > index * turns[name].share:
                continue
            time.sleep(_PAUSE_SECONDS)
            turns[name].call()
            times[name].append(_timed(turns[name].call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _repeats(seconds: float) -> int:
    return min(max(round(_BURST_SECONDS / max(seconds, 1e-9)), 1), _MOST_IN_A_BURST)


def _timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
