"""Writes the tables of options in ``docs/``: ``python -m tests.options.option_tables``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.options.declaration import Option, options_of
from coreml_delegate.options.engine_options import EngineOptions
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.options.model_interface import ModelInterface
from tests.support.generated_sections import with_section

DOCS = Path(__file__).parents[2] / "docs"

TABLES: dict[tuple[str, str], tuple[Any, Any]] = {
    ("partitioner.md", "options"): (CoreMLPartitioner, PartitionerKeywords),
    ("partitioner.md", "compile options"): (CoreMLBackend.generate_compile_specs, CompileOptions),
    ("mlpackage.md", "options"): (ModelInterface, ModelInterface),
    ("runtime.md", "engine options"): (EngineOptions, EngineOptions),
}
"""By page and section: the callable that takes the options, and their dataclass."""


def rows(function: Any, kind: Any) -> Iterator[str]:
    """Yield the lines of a table, in the order of the function's parameters."""
    options = {option.keyword: option for option in options_of(kind)}
    yield "| option | default | command line | meaning |"
    yield "|---|---|---|---|"
    for name, parameter in inspect.signature(function).parameters.items():
        option = options[name]
        meaning = re.sub(r"`+", "`", option.doc).replace("|", "\\|")
        default = _default(option, parameter.default)
        yield f"| `{name}` | {default} | {_argument(option)} | {meaning} |"


def _default(option: Option, default: Any) -> str:
    return "" if option.default is MISSING else f"`{getattr(default, 'name', default)}`"


def _argument(option: Option) -> str:
    return "" if option.argument is None else f"`{option.argument.flag}`"


def pages() -> dict[str, str]:
    """Return the documents with the tables of today, by name."""
    texts = {name: (DOCS / name).read_text() for name, _ in TABLES}
    for (name, section), (function, kind) in TABLES.items():
        texts[name] = with_section(texts[name], section, rows(function, kind))
    return texts


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
