"""A ``config.json``, read key by key, so that what nobody read can be refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from coreml_delegate.errors import OptionError

# They say nothing about what a decoder computes, or only about training it.
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
    """Values by key, with their reading recorded.

    Args:
        values: As parsed.
        where: What a message calls it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self.where = where
        self._read: set[str] = set(_INERT)

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a file.

        Raises:
            OptionError: There is none, or it is no JSON object.
        """
        if not path.is_file():
            raise OptionError("no such configuration of a model", got=str(path))
        try:
            values: object = json.loads(path.read_bytes())
        except ValueError as error:
            raise OptionError(f"{path} is not JSON", got=str(error)) from error
        if not isinstance(values, dict):
            raise OptionError(f"{path} is not a configuration", got=type(values).__name__)
        return cls(cast("dict[str, Any]", values), str(path))

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """The same, with values for keys that are absent or null."""
        present = {key: value for key, value in self._values.items() if value is not None}
        made = Config({**defaults, **present}, self.where)
        made._read |= defaults.keys() - present.keys()
        return made

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self._values.get(key) is not None

    def ignore(self, key: str) -> None:
        """Count a key as read."""
        self._read.add(key)

    def integer(self, key: str, default: Any = _ABSENT) -> Any:
        """An integer of at least 0, or the default."""
        value = self._take(key, default)
        if value is default or (type(value) is int and value >= 0):
            return value
        raise self.refused(key, "an integer")

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """A positive number, or the default."""
        value = self._take(key, default)
        if value is default or (type(value) in (int, float) and value > 0):
            return float(value)
        raise self.refused(key, "a positive number")

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._take(key, default)
        if type(value) is bool:
            return value
        raise self.refused(key, "true or false")

    def text(self, key: str, default: Any = _ABSENT) -> str:
        """A string."""
        value = self._take(key, default)
        if isinstance(value, str):
            return value
        raise self.refused(key, "a string")

    def integers(self, key: str) -> tuple[int, ...]:
        """One integer, a list of them, or none."""
        value = self._take(key, ())
        values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(type(item) is int for item in values):
            return values
        raise self.refused(key, "integers")

    def part(self, key: str) -> Config:
        """An object inside; empty, and false, if there is none."""
        value = self._take(key, {})
        if isinstance(value, dict):
            return Config(cast("dict[str, Any]", value), f"{self.where}: {key}")
        raise self.refused(key, "an object")

    def __bool__(self) -> bool:
        return bool(self._values)

    def require(self, key: str, value: Any) -> None:
        """Refuse a key that has another value; None accepts any."""
        found = self._take(key, value)
        if value is not None and found != value:
            raise self.refused(key, json.dumps(value))

    def refuse_unread(self) -> None:
        """Refuse keys that nobody has asked for.

        Raises:
            OptionError: Naming the first.
        """
        for key in sorted(self._values.keys() - self._read):
            if self._values[key] not in (None, False):
                raise self.refused(key)

    def refused(self, key: str, expected: str | None = None, got: Any = _ABSENT) -> OptionError:
        """An error about a key."""
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
