"""What holds for every test."""

from __future__ import annotations

import gc

from coreml_delegate.third_party import coremltools


def pytest_collection_finish() -> None:
    coremltools()
    # Coremltools collects garbage after each conversion; without this, half of the suite's time
    # goes to the objects of torch, which are never garbage.
    gc.collect()
    gc.freeze()
