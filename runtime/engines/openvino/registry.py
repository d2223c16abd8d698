"""Translations of MIL ops to OpenVINO, by op type and opset.

A translation is a function whose Python signature is the op's schema: parameter names and defaults
are MIL's, and the annotation of a parameter says in which form its argument arrives:

=============  ==============================================================================
``Tensor``     an OpenVINO output, constant or computed
``Tensors``    a tuple of them, for variadic parameters
``Array``      a numpy array, known at compile time
``Ints``       a tuple of Python ints, known at compile time (``Bools`` likewise)
``Sizes``      the same, with None for a size that is given as a symbol
``List``       a ``TensorList``
scalars        ``int``, ``float``, ``bool`` or ``str``, known at compile time
=============  ==============================================================================

It returns an OpenVINO node or output (a ``TensorList`` for ops on lists), or a tuple of those for
ops with several results.

A keyword-only parameter is no part of the schema: ``exact_nan`` says whether the result has to be
right for NaN even where that takes time.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.mil.opset import Opset


class Form(enum.Enum):
    """How an argument reaches a translation."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    ARRAY = "array"
    INTS = "ints"
    BOOLS = "bools"
    SIZES = "sizes"
    LIST = "list"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"


Tensor: TypeAlias = Annotated[Any, Form.TENSOR]
Tensors: TypeAlias = Annotated[tuple[Any, ...], Form.TENSORS]
Array: TypeAlias = Annotated[NDArray[np.generic], Form.ARRAY]
Ints: TypeAlias = Annotated[tuple[int, ...], Form.INTS]
Bools: TypeAlias = Annotated[tuple[bool, ...], Form.BOOLS]

Sizes: TypeAlias = Annotated[tuple[int | None, ...], Form.SIZES]

_SCALAR_FORMS: dict[object, Form] = {
    int: Form.INT,
    float: Form.FLOAT,
    bool: Form.BOOL,
    str: Form.STR,
}

Result: TypeAlias = Any
"""What a translation returns: an OpenVINO ``Node`` or ``Output``, a ``TensorList``, or several."""

_Function = TypeVar("_Function", bound=Callable[..., Result])


@dataclass(frozen=True, slots=True)
class Weight:
    """A compressed constant: expanded on demand for a compile-time consumer, a subgraph otherwise.

    Attributes:
        dense: Computes the full array.
        node: Builds the OpenVINO subgraph that expands it, or None when expansion comes first.
    """

    dense: Callable[[], NDArray[np.generic]]
    node: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class TensorList:
    """A MIL list: its elements along the first axis of one tensor.

    Attributes:
        elements: [length, *element shape]. Before anything is written to a list whose element shape
            is known only at run time, the sizes that are not known are 0.
        grows: Whether writing beyond the end makes the list longer.
    """

    elements: Any
    grows: bool


List: TypeAlias = Annotated[TensorList, Form.LIST]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a translation."""

    name: str
    form: Form
    required: bool


@dataclass(frozen=True, slots=True)
class Translation:
    """One translation: from ``since`` on, until a newer one of the same op type.

    Attributes:
        op_type: MIL op type.
        since: The opset it came with.
        function: Adds the op to the graph.
        parameters: Those of the op's schema.
        loses_nan: Whether it is right for NaN only if ``exact_nan`` asks for that.
    """

    op_type: str
    since: Opset
    function: Callable[..., Result]
    parameters: tuple[Parameter, ...]
    loses_nan: bool


_EXACT_NAN = "exact_nan"

_TRANSLATIONS: dict[str, list[Translation]] = {}


def register(
    op_type: str, function: Callable[..., Result], since: Opset = Opset.iOS15
) -> Translation:
    """Add ``function`` as the translation of ``op_type``, for families built from a table.

    Raises:
        ValueError: The op type already has a translation since that opset.
    """
    versions = _TRANSLATIONS.setdefault(op_type, [])
    if any(version.since is since for version in versions):
        raise ValueError(f"MIL op {op_type!r} has two translations since {since.mil_name}")
    loses_nan = _EXACT_NAN in inspect.signature(function).parameters
    entry = Translation(op_type, since, function, _parameters(function), loses_nan)
    versions.append(entry)
    versions.sort(key=lambda version: version.since, reverse=True)
    return entry


def translation(op_type: str, since: Opset = Opset.iOS15) -> Callable[[_Function], _Function]:
    """Decorator form of :func:`register`."""

    def add(function: _Function) -> _Function:
        register(op_type, function, since)
        return function

    return add


def find(op_type: str, opset: Opset) -> Translation | None:
    """The newest translation of ``op_type`` that ``opset`` has, or None."""
    versions = _TRANSLATIONS.get(op_type, ())
    return next((version for version in versions if version.since <= opset), None)


def translations() -> list[Translation]:
    """Every translation, by op type and opset."""
    return [
        entry for op_type in sorted(_TRANSLATIONS) for entry in reversed(_TRANSLATIONS[op_type])
    ]


def refuse(what: str, got: object, expected: str | None = None) -> UnsupportedOpError:
    """The error of a translation that meets a mode or a form it cannot express."""
    return UnsupportedOpError(what, got=str(got), expected=expected)


def _parameters(function: Callable[..., Result]) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(function, include_extras=True)
    return tuple(
        Parameter(name, _form(hints[name]), parameter.default is inspect.Parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    )


def _form(hint: object) -> Form:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
    if hint in _SCALAR_FORMS:
        return _SCALAR_FORMS[hint]
    (form,) = (extra for extra in typing.get_args(hint)[1:] if isinstance(extra, Form))
    return form
