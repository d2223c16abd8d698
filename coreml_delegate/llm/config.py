"""A ``config.json`` that records which keys were read, so that unread keys can be refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from coreml_delegate.errors import OptionError

# Keys that do not change what a decoder computes in inference.
_INERT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
_ABSENT: Any = object()


class Config:
    """Values by key; each read is recorded.

    Args:
        values: The parsed object.
        where: Name of the configuration in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self.where = where
        self._read: set[str] = set(_INERT)

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a file.

        Raises:
            OptionError: The file does not exist or is no JSON object.
        """
        if not path.is_file():
            raise OptionError("no such model configuration", got=str(path))
        try:
            values: object = json.loads(path.read_bytes())
        except ValueError as error:
            raise OptionError(f"{path} is not JSON", got=str(error)) from error
        if not isinstance(values, dict):
            raise OptionError(f"{path} is not a model configuration", got=type(values).__name__)
        return cls(cast("dict[str, Any]", values), str(path))

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """Return the configuration with values for keys that are absent or null."""
        present = {key: value for key, value in self._values.items() if value is not None}
        made = Config({**defaults, **present}, self.where)
        made._read |= defaults.keys() - present.keys()
        return made

    def has(self, key: str) -> bool:
        """Whether a key is present and not null."""
        return self._values.get(key) is not None

    def ignore(self, key: str) -> None:
        """Count a key as read."""
        self._read.add(key)

    def integer(self, key: str, default: Any = _ABSENT) -> Any:
        """Read an integer of at least 0, or the default."""
        value = self._take(key, default)
        if value is default or (type(value) is int and value >= 0):
            return value
        raise self.refused(key, "an integer")

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """Read a positive number, or the default."""
        value = self._take(key, default)
        if value is default or (type(value) in (int, float) and value > 0):
            return float(value)
        raise self.refused(key, "a positive number")

    def flag(self, key: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self._take(key, default)
        if type(value) is bool:
            return value
        raise self.refused(key, "true or false")

    def text(self, key: str, default: Any = _ABSENT) -> str:
        """Read a string."""
        value = self._take(key, default)
        if isinstance(value, str):
            return value
        raise self.refused(key, "a string")

    def integers(self, key: str) -> tuple[int, ...]:
        """Read one integer, a list of integers, or nothing."""
        value = self._take(key, ())
        values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(type(item) is int for item in values):
            return values
        raise self.refused(key, "integers")

    def part(self, key: str) -> Config:
        """Read a nested object; an empty configuration, which is false, if there is none."""
        value = self._take(key, {})
        if isinstance(value, dict):
            return Config(cast("dict[str, Any]", value), f"{self.where}: {key}")
        raise self.refused(key, "an object")

    def __bool__(self) -> bool:
        return bool(self._values)

    def require(self, key: str, value: Any) -> None:
        """Refuse a key with another value than this; None accepts any value."""
        found = self._take(key, value)
        if value is not None and found != value:
            raise self.refused(key, json.dumps(value))

    def refuse_unread(self) -> None:
        """Refuse a configuration with keys that were never read.

        Raises:
            OptionError: There are such keys; it names the first.
        """
        for key in sorted(self._values.keys() - self._read):
            if self._values[key] not in (None, False):
                raise self.refused(key)

    def refused(self, key: str, expected: str | None = None, got: Any = _ABSENT) -> OptionError:
        """Return the error for a key that is not supported."""
        value = self._values.get(key) if got is _ABSENT else got
        return OptionError(
            f"{self.where}: {key!r} is not supported", got=json.dumps(value), expected=expected
        )

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            raise OptionError(f"{self.where} lacks {key!r}")
        return default
