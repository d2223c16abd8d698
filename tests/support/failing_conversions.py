"""Make coremltools fail at an op, and count its conversions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coreml_delegate.lowering import trial
from coreml_delegate.patches.third_party import coremltools

MESSAGE = "made to fail"


def fresh_trials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Start without verdicts of trials, and cache new verdicts in ``folder``."""
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(folder))
    monkeypatch.setattr(trial.TRIALS, "cached", {})
    monkeypatch.setattr(trial.TRIALS, "loaded_from", None)


def fail_at(monkeypatch: pytest.MonkeyPatch, op: str, *, before: Any = None) -> None:
    """Let coremltools' translation of ``op`` raise; with ``before`` only at older targets."""
    coremltools()
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
    from coremltools.converters.mil.mil.block import (
        is_current_opset_version_compatible_with,
    )

    translate = _TORCH_OPS_REGISTRY.name_to_func_mapping[op]

    def failing(context: Any, node: Any) -> None:
        if before is None or not is_current_opset_version_compatible_with(before):
            raise ValueError(MESSAGE)
        translate(context, node)

    monkeypatch.setitem(_TORCH_OPS_REGISTRY.name_to_func_mapping, op, failing)


def fail_as_a_whole(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Let conversions of programs with ``op`` raise, naming no node; translations succeed."""
    ct = coremltools()
    convert = ct.convert

    def failing(program: Any, **keywords: Any) -> Any:
        ops = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        if keywords["convert_to"] == "mlprogram" and any(op in name for name in ops):
            raise ValueError(MESSAGE)
        return convert(program, **keywords)

    monkeypatch.setattr(ct, "convert", failing)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count coremltools' conversions by their target format."""
    ct = coremltools()
    convert, counts = ct.convert, Counter[str]()

    def counting(program: Any, **keywords: Any) -> Any:
        counts[keywords["convert_to"]] += 1
        return convert(program, **keywords)

    monkeypatch.setattr(ct, "convert", counting)
    return counts
