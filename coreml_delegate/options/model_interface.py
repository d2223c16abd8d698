"""``ModelInterface``: the inputs and outputs of an ``.mlpackage``, as an app uses them."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.added_steps import BRIGHTEST, Factors
from coreml_delegate.options.checks import (
    Check,
    flag,
    instance,
    list_of,
    member,
    number,
    optional,
    refused,
    values_of,
)
from coreml_delegate.options.declaration import (
    Argument,
    check_fields,
    option,
    option_class,
)

_RESERVED = frozenset(
    (
        *("any", "bool", "program", "func", "tensor", "list", "dict", "tuple", "true", "false"),
        *("string", "state", "bf16", "fp16", "fp32", "fp64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
)
"""Words of MIL's text form."""


class ColorLayout(enum.Enum):
    """Channels of an image, and their order in the model's tensor."""

    RGB = "rgb"
    BGR = "bgr"
    GRAYSCALE = "grayscale"

    @property
    def channels(self) -> int:
        """Number of channels."""
        return 1 if self is ColorLayout.GRAYSCALE else 3


@dataclass(frozen=True, slots=True)
class ImageFeature:
    """An input or output that is an image: the model's value is ``scale * pixel + bias``.

    Pixels are from 0 to 255. An output has the pixels themselves.

    Attributes:
        layout: ``ColorLayout`` or its value, ``"rgb"``, ``"bgr"`` or ``"grayscale"``.
        scale: A number, or one for each channel in the order of the layout.
        bias: As ``scale``.

    Raises:
        OptionError: No such layout, or a wrong number of factors.
    """

    layout: ColorLayout | str = ColorLayout.RGB
    scale: float | Sequence[float] = 1.0
    bias: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        layout = member(ColorLayout, texts=values_of(ColorLayout))("layout", self.layout)
        object.__setattr__(self, "layout", layout)
        for name in ("scale", "bias"):
            object.__setattr__(self, name, _per_channel(name, getattr(self, name), layout.channels))

    @classmethod
    def normalized(
        cls,
        *,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        layout: ColorLayout | str = ColorLayout.RGB,
    ) -> ImageFeature:
        """Return an image that a model takes as ``(pixel / 255 - mean) / std``.

        Args:
            mean: A number, or one for each channel; torchvision's for pixels from 0 to 1.
            std: As ``mean``.
            layout: See ``ImageFeature``.

        Raises:
            OptionError: As ``ImageFeature``; or a ``std`` is 0.
        """
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if not all(stds):
            raise OptionError("std must not be 0", got=str(std))
        if len(means) == 1:
            means *= len(stds)
        if len(stds) == 1:
            stds *= len(means)
        if len(means) != len(stds):
            raise OptionError(
                "mean and std have different numbers of channels", got=f"{mean}, {std}"
            )
        biases = [-m / s for m, s in zip(means, stds, strict=True)]
        return cls(layout, [1 / (BRIGHTEST * s) for s in stds], biases)

    @property
    def factors(self) -> tuple[Factors, Factors]:
        """Scale and bias."""
        return cast("Factors", self.scale), cast("Factors", self.bias)

    @property
    def has_pixels(self) -> bool:
        """Whether the model's values are the pixels themselves."""
        return self.factors == ((1.0,), (0.0,))


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    values: Any = value if isinstance(value, list | tuple) else (value,)
    return tuple(number(name, item) for item in cast("Sequence[Any]", values))


def _per_channel(name: str, value: Any, channels: int) -> tuple[float, ...]:
    """Check one number or a number for each channel; equal numbers become one."""
    values = _numbers(name, value)
    if len(values) not in {1, channels}:
        expected = "1" if channels == 1 else f"1, or {channels} separated by /"
        raise OptionError(
            f"{name} has a wrong number of values", got=str(len(values)), expected=expected
        )
    return values[:1] if len(set(values)) == 1 else values


_FIELDS: Mapping[str, Callable[..., ImageFeature]] = {
    "scale": ImageFeature,
    "bias": ImageFeature,
    "mean": ImageFeature.normalized,
    "std": ImageFeature.normalized,
}


def _image_of(text: str) -> tuple[str, ImageFeature]:
    """Parse ``x:scale=0.0078,bias=-1,layout=rgb``."""
    name, _, settings = text.partition(":")
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, separator, value = setting.partition("=")
        if not separator or key not in (*_FIELDS, "layout") or key in values:
            raise OptionError(
                f"{text!r} is no image",
                got=setting,
                expected=f"{', '.join(_FIELDS)} or layout, each once, as in x:scale=0.0078,bias=-1",
            )
        values[key] = value if key == "layout" else _channels_of(key, value)
    makers = {_FIELDS[key] for key in values if key in _FIELDS} or {ImageFeature}
    if len(makers) > 1:
        raise OptionError(
            "mean and std exclude scale and bias",
            got=text,
            remedy="Pass mean and std for (pixel / 255 - mean) / std, or scale and bias for "
            "scale * pixel + bias",
        )
    return name, makers.pop()(**values)


def _channels_of(key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split("/")]
    except ValueError:
        raise OptionError(
            f"{key} is no number", got=text, expected="a number, or three separated by /"
        ) from None


def _pair_of(text: str) -> tuple[str, str]:
    """Parse ``NAME=TEXT``."""
    name, separator, value = text.partition("=")
    if not separator:
        raise OptionError(f"{text!r} has no =", expected="NAME=TEXT")
    return name, value


def _read_labels(path: Path) -> tuple[str, ...]:
    """Read the labels of a file, one a line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"cannot read the labels in {path}",
            got=getattr(error, "strerror", None) or str(error),
            expected="a text file in UTF-8 with a label on each line",
        ) from error
    labels = [line.strip() for line in lines]
    while labels and not labels[-1]:
        labels.pop()
    if not all(labels):
        raise OptionError(
            f"{path} has an empty line",
            got=f"line {labels.index('') + 1}",
            expected="a label on each line",
        )
    return tuple(labels)


def _check_labels(name: str, value: Any) -> tuple[str, ...] | Path:
    if isinstance(value, Path):  # not read yet: the command line checks options before it runs
        return value
    labels = list_of("texts", str)(name, value)
    if not labels:
        raise OptionError(f"{name} are empty", expected="a label for each class")
    label, count = Counter(labels).most_common(1)[0]
    if count > 1:
        raise OptionError(
            f"{name} have a label twice",
            got=repr(label),
            expected="a different label for each class, because probabilities are by label",
        )
    return labels


def _by_name(check: Check) -> Check:
    """Return a check of a dictionary, or a list of pairs, of names and values."""

    def checked(name: str, value: Any) -> dict[str, Any]:
        pairs = list(value.items()) if isinstance(value, Mapping) else list(value or ())
        result: dict[str, Any] = {}
        for key, item in pairs:
            if not isinstance(key, str) or not key:
                raise refused(name, "must have names of inputs and outputs", key)
            if key in result:
                raise OptionError(f"{name} has a name twice", got=repr(key))
            result[key] = check(name, item)
        return result

    return checked


def feature_name(name: str) -> str:
    """Return a name that Core ML takes: ``past.key[0]`` becomes ``past_key_0``.

    Such a name has letters, digits and ``_``, does not begin with a digit, and is no word of MIL.

    Source: coremltools 9.0, ``NameSanitizer``.
    """
    text = name if name.isidentifier() else re.sub(r"\W+", "_", name).strip("_")
    text = re.sub(r"[^A-Za-z0-9_]", "_", text)
    if not text or text[0].isdigit():
        return f"_{text}"
    return f"{text}_" if text in _RESERVED else text


def _check_new_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or feature_name(value) != value:
        raise OptionError(
            f"Core ML does not take a name in {name}",
            got=repr(value),
            expected="letters, digits and _, no digit first, and no word of MIL such as state",
        )
    return value


_text = instance(str, "a text")


def _repeatable(flag: str, metavar: str, parse: Callable[[str], object]) -> Argument:
    return Argument(flag, metavar=metavar, parse=parse, is_repeatable=True)


@option_class(kw_only=True)
class ModelInterface:
    """The inputs, outputs and description of an ``.mlpackage``.

    Inputs, outputs and states have the names of the model, before ``names`` replaces them.

    Attributes:
        options: See the fields.

    Raises:
        OptionError: A value is not accepted.
    """

    images: Mapping[str, ImageFeature] | None = option(
        default=None,
        check=_by_name(instance(ImageFeature, "an ImageFeature")),
        doc="Inputs and outputs that are images, each with its ``ImageFeature``: the model's input "
        "is ``scale * pixel + bias``, or ``(pixel / 255 - mean) / std`` by ``mean`` and ``std``.",
        argument=Argument(
            "--image",
            "an input or output that is an image, such as x:scale=0.0078,bias=-1,layout=rgb: the "
            "model takes scale * pixel + bias, or with mean and std (pixel / 255 - mean) / std; "
            "each is a number or three separated by /; layout is rgb, bgr or grayscale",
            "NAME[:KEY=VALUE,...]",
            _image_of,
            is_repeatable=True,
        ),
    )
    names: Mapping[str, str] | None = option(
        default=None,
        check=_by_name(_check_new_name),
        doc="New names of inputs, outputs and states, by their old names.",
        argument=_repeatable("--rename", "OLD=NEW", _pair_of),
    )
    labels: Sequence[str] | Path | None = option(
        default=None,
        check=optional(_check_labels),
        doc="The labels of a classifier, in the order of the elements of its output, or the path "
        "of a file with one a line: the model returns ``classLabel`` and ``classLabel_probs`` in "
        "place of the output.",
        argument=Argument(
            "--labels",
            "the labels of a classifier, a file with one a line: the model returns classLabel and "
            "classLabel_probs in place of the output with as many elements",
            "FILE",
            Path,
        ),
    )
    softmax: bool = option(
        default=False,
        check=flag,
        doc="Apply softmax to the output with the labels, for a model that returns logits.",
        argument=Argument("--softmax"),
    )
    author: str | None = option(
        default=None,
        check=optional(_text),
        doc="Author, for Xcode.",
        argument=Argument("--author", metavar="TEXT"),
    )
    license: str | None = option(
        default=None,
        check=optional(_text),
        doc="License, for Xcode.",
        argument=Argument("--license", metavar="TEXT"),
    )
    description: str | None = option(
        default=None,
        check=optional(_text),
        doc="Description of the model, for Xcode.",
        argument=Argument("--description", metavar="TEXT"),
    )
    version: str | None = option(
        default=None,
        check=optional(_text),
        doc="Version of the model, for Xcode.",
        argument=Argument("--model-version", metavar="TEXT"),
    )
    descriptions: Mapping[str, str] | None = option(
        default=None,
        check=_by_name(_text),
        doc="Descriptions of inputs, outputs and states, for Xcode.",
        argument=_repeatable("--describe", "NAME=TEXT", _pair_of),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.labels, Path):
            labels = _check_labels("labels", _read_labels(self.labels))
            object.__setattr__(self, "labels", labels)
        if self.softmax and self.labels is None:
            raise OptionError(
                "softmax is for the output with the labels", remedy="Pass labels (--labels) too"
            )
