"""Calls of every operation of the graph builder, with what NumPy or JAX computes for them.

Every module here is a family; its ``SAMPLES`` are collected.
"""

from __future__ import annotations

import importlib
import pkgutil

from graph.samples.sample import Sample

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "sample"
]

SAMPLES: dict[str, list[Sample]] = {}
"""The samples by operation."""

for _module in _MODULES:
    for _sample in _module.SAMPLES:
        SAMPLES.setdefault(_sample.operation, []).append(_sample)

__all__ = ["SAMPLES", "Sample"]
