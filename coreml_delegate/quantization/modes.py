"""The table of quantization modes: names, requirements, and the finer fallback mode.

A name is fixed (``int8-static``) or contains numbers (``int4-group32``), here ``N`` and ``M``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.targets import Opset


class Method(enum.Enum):
    """The library function that quantizes."""

    PT2E = "CoreMLQuantizer on the exported program"
    MODULES = "torchao's quantize_ on the modules"
    CONVERSION = "coremltools on the converted weights"


@dataclass(frozen=True, slots=True)
class QuantizationMode:
    """A quantization mode.

    Attributes:
        name: Name for the user, ``int8-static`` or ``int4-group32`` for example.
        method: The library function that quantizes.
        bits: Bits per weight.
        summary: Summary for help texts, with ``N`` for the number in the name.
        target: The oldest deployment target with support.
        activations: Whether activations are quantized too, which needs calibration data.
        group_size: Number of weights of a row that share a scale; None for the whole row.
        codebook: Whether weights are indices into a table of values.
        rows_per_table: Number of rows (outputs) that share a table; None for one table.
        sparsity: Fraction of the weights that become zero, 0 to 1.
        relief: Name of the finer mode for a layer that loses too much accuracy; None for float.
    """

    name: str
    method: Method
    bits: int
    summary: str
    target: Opset
    activations: bool = False
    group_size: int | None = None
    codebook: bool = False
    rows_per_table: int | None = None
    sparsity: float = 0.0
    relief: str | None = None

    @property
    def lowering_target(self) -> Opset | None:
        """The target to lower for if the user does not name one, or None.

        The weights of modes from iOS18 on are stored compressed only for an explicit target; for
        older modes the partitioner finds the oldest target of the whole model.
        """
        return self.target if self.target >= _EXPLICIT_FROM else None

    def require_target(self, target: Opset | None, option: str) -> None:
        """Check the target that the user named.

        Raises:
            OptionError: The target is too old for this mode.
        """
        if target is not None and target < self.target:
            raise OptionError(
                f"{option} must be {self.target.name} or higher for {self.name}",
                got=target.name,
                remedy=f"Pass {self.target.name}, or leave it out",
            )


_EXPLICIT_FROM = Opset.iOS18


@dataclass(frozen=True, slots=True)
class _Number:
    """A number in the names of a family of modes.

    Attributes:
        field: Attribute of ``QuantizationMode`` that the number determines.
        accepted: Accepted numbers.
    """

    field: str
    accepted: Sequence[int]

    def value(self, text: str, form: str, name: str) -> float:
        """Return the value of the attribute.

        Raises:
            OptionError: The number is not accepted.
        """
        if int(text) not in self.accepted:
            raise OptionError(
                f"{form} does not take this number", got=name, expected=_numbers_text(self.accepted)
            )
        return int(text) / 100 if self.field == "sparsity" else int(text)


@dataclass(frozen=True, slots=True)
class _Row:
    """A mode, or a family of modes with numbers as parameters.

    Attributes:
        form: Name, with ``N`` for the first number and ``M`` for the second.
        mode: Its properties; the properties of the numbers are placeholders.
        numbers: The numbers of a family.
    """

    form: str
    mode: QuantizationMode
    numbers: Sequence[_Number] = ()

    def read(self, name: str) -> QuantizationMode | None:
        """Return the mode of a name, or None if the name has another form.

        Raises:
            OptionError: The name has this form, but a number is not accepted.
        """
        if not self.numbers:
            return self.mode if name == self.form else None
        match = re.fullmatch(re.sub("[NM]", r"(-?\\d+)", self.form), name)
        if match is None:
            return None
        values = {
            number.field: number.value(text, self.form, name)
            for number, text in zip(self.numbers, match.groups(), strict=True)
        }
        return replace(self.mode, name=name, **values)  # pyright: ignore[reportArgumentType]


def _numbers_text(numbers: Sequence[int]) -> str:
    if isinstance(numbers, range):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _row(form: str, *numbers: _Number, **properties: object) -> _Row:
    bits = {"bits": 0} if any(number.field == "bits" for number in numbers) else {}
    mode = QuantizationMode(name=form, **(bits | properties))  # pyright: ignore[reportArgumentType]
    return _Row(form, mode, numbers)


_GROUPS = range(2, 4097)
_pt2e, _modules, _conversion = (partial(_row, method=method) for method in Method)
_ROWS = (
    _pt2e(
        "int8-static",
        bits=8,
        activations=True,
        target=Opset.iOS17,
        relief="int8-weight",
        summary="weights and activations in 8 bits; needs calibration data",
    ),
    _pt2e(
        "int8-weight",
        bits=8,
        target=Opset.iOS17,
        summary="weights of every kind of layer in 8 bits, a scale per output channel",
    ),
    _pt2e(
        "int4-weight",
        bits=4,
        target=Opset.iOS18,
        relief="int8-weight",
        summary="weights of every kind of layer in 4 bits, a scale per output channel",
    ),
    _modules(
        "int8-channel",
        bits=8,
        target=Opset.iOS16,
        summary="linear layers and embeddings in 8 bits, a scale per output channel",
    ),
    _modules(
        "int4-channel",
        bits=4,
        target=Opset.iOS18,
        relief="int8-channel",
        summary="linear layers and embeddings in 4 bits, a scale per output channel",
    ),
    _modules(
        "int8-groupN",
        _Number("group_size", _GROUPS),
        bits=8,
        target=Opset.iOS18,
        summary="linear layers and embeddings in 8 bits, a scale for N weights",
    ),
    _modules(
        "int4-groupN",
        _Number("group_size", _GROUPS),
        bits=4,
        target=Opset.iOS18,
        relief="int8-channel",
        summary="linear layers and embeddings in 4 bits, a scale for N weights",
    ),
    _modules(
        "codebook-N",
        _Number("bits", range(1, 9)),
        codebook=True,
        target=Opset.iOS18,
        relief="int8-channel",
        summary="linear layers and embeddings as N-bit indices into 2**N values",
    ),
    _modules(
        "codebook-N-groupM",
        _Number("bits", range(1, 9)),
        _Number("rows_per_table", _GROUPS),
        codebook=True,
        target=Opset.iOS18,
        relief="int8-channel",
        summary="the same, with a table for M output channels",
    ),
    _conversion(
        "palettize-N",
        _Number("bits", (1, 2, 3, 4, 6, 8)),
        codebook=True,
        target=Opset.iOS16,
        summary="weights of more than 2048 elements as N-bit indices, after conversion",
    ),
    _conversion(
        "prune-N",
        _Number("sparsity", range(1, 100)),
        bits=16,
        target=Opset.iOS16,
        summary="the smallest N percent of the same weights become zero, after conversion",
    ),
)
FORMS: Mapping[str, str] = MappingProxyType({row.form: row.mode.summary for row in _ROWS})
"""Summary of each form of mode names, for help texts."""
MODULE_FORMS = tuple(row.form for row in _ROWS if row.mode.method is Method.MODULES)
"""The forms of modes that quantize linear layers and embeddings in PyTorch."""


def mode_of(name: str) -> QuantizationMode:
    """Return the mode of a name.

    Raises:
        OptionError: There is no such mode; the error names near matches.
    """
    for row in _ROWS:
        mode = row.read(name)
        if mode is not None:
            return mode
    raise OptionError(
        "unknown quantization mode",
        got=repr(name),
        expected=near_matches(re.sub(r"\d+$", "N", name), FORMS),
    )
