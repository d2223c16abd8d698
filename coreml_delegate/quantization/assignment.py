"""The quantization mode of each module of a model, and its JSON file.

The file has one object::

    schema_version  1
    mode            mode of the modules that are not listed
    modules         object: module path -> mode, or null to leave the module in float

A path applies to the module and its submodules. A name in it may contain ``*`` for any characters
(``model.layers.*.mlp``). If several paths apply, the one with the most names decides, then the one
with the most characters besides ``*``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from coreml_delegate.errors import OptionError
from coreml_delegate.quantization.modes import Method, QuantizationMode, mode_of

SCHEMA_VERSION = 1
WILDCARD = "*"
_KEYS = ("schema_version", "mode", "modules")


@dataclass(frozen=True, slots=True)
class QuantizationAssignment:
    """Modes by module.

    Attributes:
        mode: Mode of the modules that ``modules`` does not list.
        modules: Modes by module path, which may contain ``*``; None leaves a module in float.

    Raises:
        OptionError: The modes cannot be combined.
    """

    mode: QuantizationMode
    modules: Mapping[str, QuantizationMode | None] = field(
        default_factory=dict[str, QuantizationMode | None]
    )

    def __post_init__(self) -> None:
        if self.modules and self.mode.method is Method.CONVERSION:
            raise OptionError(
                f"{self.mode.name} is applied to converted weights, which belong to no module",
                got=f"modes for {len(self.modules)} modules",
                remedy="Leave modules out",
            )
        incompatible = [
            mode for mode in self.modules.values() if mode and mode.method is not self.mode.method
        ]
        if incompatible:
            raise OptionError(
                f"{incompatible[0].name} and {self.mode.name} cannot be combined",
                got=f"{incompatible[0].method.value}, and {self.mode.method.value}",
                remedy="Choose modes of one method",
            )

    @property
    def modes(self) -> tuple[QuantizationMode, ...]:
        """The distinct modes."""
        listed = (self.mode, *self.modules.values())
        return tuple(dict.fromkeys(mode for mode in listed if mode is not None))

    @property
    def activations(self) -> bool:
        """Whether any mode quantizes activations."""
        return any(mode.activations for mode in self.modes)

    @property
    def newest(self) -> QuantizationMode:
        """The mode that needs the newest deployment target."""
        return max(self.modes, key=lambda mode: mode.target)

    def mode_for(self, path: str) -> QuantizationMode | None:
        """Return the mode of a module."""
        modes = (mode for rule, mode in self.ordered().items() if applies(rule, path))
        return next(modes, self.mode)

    def ordered(self) -> dict[str, QuantizationMode | None]:
        """Return ``modules``; of several paths that apply to a module the first decides."""
        paths = sorted(
            self.modules,
            key=lambda path: (path.count("."), len(path.replace(WILDCARD, "")), path),
            reverse=True,
        )
        return {path: self.modules[path] for path in paths}

    def as_dict(self) -> dict[str, Any]:
        """Return the assignment as the JSON object of a file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode.name,
            "modules": {
                path: None if mode is None else mode.name
                for path, mode in sorted(self.modules.items())
            },
        }

    def to_json(self) -> str:
        """Return the JSON text of a file; equal assignments give equal text."""
        return json.dumps(self.as_dict(), indent=2)

    @classmethod
    def read(cls, path: Path) -> QuantizationAssignment:
        """Read an assignment from a JSON file.

        Raises:
            OptionError: The file cannot be read, or is not an assignment.
        """
        try:
            document: object = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise OptionError(f"cannot read {path}", got=str(error)) from error
        try:
            return cls.from_document(document)
        except OptionError as error:
            raise error.prefixed(f"{path}: ") from error

    @classmethod
    def from_document(cls, document: object) -> QuantizationAssignment:
        """Decode the JSON object of ``to_json``.

        Raises:
            OptionError: The document is not an assignment.
        """
        if not isinstance(document, dict):
            raise OptionError("not a quantization config", expected="a JSON object")
        values = cast("dict[str, Any]", document)
        unknown = sorted(set(values) - set(_KEYS))
        if unknown:
            raise OptionError(
                "unknown key", got=", ".join(map(repr, unknown)), expected=", ".join(_KEYS)
            )
        if values.get("schema_version") != SCHEMA_VERSION:
            raise OptionError(
                "schema_version",
                got=repr(values.get("schema_version")),
                expected=str(SCHEMA_VERSION),
            )
        modules: object = values.get("modules", {})
        if not isinstance(modules, dict):
            raise OptionError(
                "modules", got=repr(modules), expected="an object of paths with their modes"
            )
        named = cast("dict[str, object]", modules)
        return cls(
            _mode("mode", values.get("mode")),
            {
                path: None if name is None else _mode(f"modules[{path!r}]", name)
                for path, name in named.items()
            },
        )


def path_pattern(path: str) -> str:
    """Return the regular expression of a module path, in which ``*`` is a part of one name."""
    return re.escape(path).replace(re.escape(WILDCARD), r"[^.]*")


def applies(rule: str, path: str) -> bool:
    """Whether a path of an assignment applies to the module of a path."""
    return re.match(rf"{path_pattern(rule)}(\.|$)", path) is not None


def _mode(key: str, name: object) -> QuantizationMode:
    if not isinstance(name, str):
        raise OptionError(key, got=repr(name), expected="the name of a quantization mode")
    return mode_of(name)
