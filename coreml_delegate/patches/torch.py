"""Patches of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from coreml_delegate.patches import Patch


def _no_guard_code(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    del original
    return lambda graph_module: []  # noqa: ARG005 - torch passes it


SKIP_GUARD_CODE = Patch(
    owner=lambda: importlib.import_module("torch.export.exported_program"),
    name="_convert_guards_to_code",
    replacement=_no_guard_code,
    reason=(
        "every new ExportedProgram prints the guards of dynamic shapes as code, which only its "
        "module() reads: 10 s of 42 s to lower two stages of Swin V2 with dynamic height and width"
    ),
    issue=None,
    library="torch",
    versions=("2.13",),
)
