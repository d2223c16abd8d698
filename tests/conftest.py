"""What holds for every test."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    # Coremltools collects garbage after each conversion; without this, half of the suite's time
    # goes to the objects of torch, which are never garbage.
    gc.collect()
    gc.freeze()
