"""Values of a program under translation, and the forms in which translations take them.

The annotation of a translation's parameter says in which form its argument arrives:

=============  ==============================================================================
``Tensor``     an OpenVINO output, constant or computed
``Tensors``    a tuple of outputs, for variadic parameters
``Array``      a numpy array, known at compile time
``Integers``   a numpy array, or ``Packed`` if the program stores it packed
``Ints``       a tuple of Python ints, known at compile time (``Bools`` likewise)
``Sizes``      a tuple of Python ints, with None for a size that is a symbol
``List``       a ``TensorList``
scalars        ``int``, ``float``, ``bool`` or ``str``, known at compile time
=============  ==============================================================================
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.mil.program import Packed


@dataclass(frozen=True, slots=True)
class Weight:
    """A compressed constant: an array for readers at compile time, a subgraph for other readers.

    Attributes:
        dense: Computes the full array.
        node: Builds the OpenVINO subgraph that expands it; None if only the full array can be used.
    """

    dense: Callable[[], NDArray[np.generic]]
    node: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class TensorList:
    """A MIL list: its elements along the first axis of one tensor.

    Attributes:
        elements: [length, *element shape]. Sizes of the element that are known only at run time are
            0 until the first write.
        grows: Whether writing beyond the end makes the list longer.
    """

    elements: Any
    grows: bool


Value: TypeAlias = Any
"""Value of a name: a ``Constant``, a ``Weight``, a ``TensorList`` or an OpenVINO output."""


class Form(enum.Enum):
    """How an argument reaches a translation."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    ARRAY = "array"
    INTEGERS = "integers"
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
Integers: TypeAlias = Annotated[NDArray[np.generic] | Packed, Form.INTEGERS]
Ints: TypeAlias = Annotated[tuple[int, ...], Form.INTS]
Bools: TypeAlias = Annotated[tuple[bool, ...], Form.BOOLS]
Sizes: TypeAlias = Annotated[tuple[int | None, ...], Form.SIZES]
List: TypeAlias = Annotated[TensorList, Form.LIST]

Result: TypeAlias = Any
"""Result of a translation: an OpenVINO node or output, a ``TensorList`` for ops on lists, or a
tuple of results."""

_SCALAR_FORMS: dict[object, Form] = {
    int: Form.INT,
    float: Form.FLOAT,
    bool: Form.BOOL,
    str: Form.STR,
}


def form_of(hint: object) -> Form:
    """Return the form that an annotation (or its optional variant) declares."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
    if hint in _SCALAR_FORMS:
        return _SCALAR_FORMS[hint]
    (form,) = (extra for extra in typing.get_args(hint)[1:] if isinstance(extra, Form))
    return form


def refusal(what: str, got: object, expected: str | None = None) -> UnsupportedOpError:
    """Return the error for a mode or type that a translation cannot express."""
    return UnsupportedOpError(what, got=str(got), expected=expected)
