"""Translations of MIL ops to OpenVINO: one function per version of an op, one module per family.

``values`` defines the forms of arguments and results. A translation may have the option
``exact_nan``: whether the result has to be right for NaN even where that takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from coreml_delegate.runtime.engines.op_table import OpTable, OpVersion, Schema
from coreml_delegate.runtime.engines.openvino.values import Form, Tensor, form_of
from coreml_delegate.targets import Opset

Function = TypeVar("Function", bound=Callable[..., Any])

EXACT_NAN: Final = "exact_nan"
"""The option of translations that are right for NaN only on request."""

TRANSLATIONS: OpTable[OpVersion[Form]] = OpTable("translation", __name__)
"""The ops that OpenVINO can express."""


def translation(
    *op_types: str, since: Opset = Opset.iOS15, **fixed: object
) -> Callable[[Function], Function]:
    """Register a function as the translation of op types that share a schema.

    Args:
        op_types: MIL op types.
        since: First opset with this version of the op.
        fixed: See ``OpVersion.fixed``.

    Raises:
        ValueError: The op already has a translation for that opset.
    """

    def register(function: Function) -> Function:
        schema = Schema.read(function, form_of, fixed)
        for op_type in op_types:
            TRANSLATIONS.add(OpVersion(op_type, since, function, schema, fixed))
        return function

    return register


Expressions = Mapping[str, tuple[Mapping[str, object], Callable[..., Any]]]
"""Translations that are one expression of ``x``, a tensor, by op type: annotations of the
parameters after ``x``, and the function."""


def register_expressions(expressions: Expressions) -> None:
    """Register expressions as translations; see ``translation``."""
    for op_type, (parameters, function) in expressions.items():
        function.__annotations__ = {"x": Tensor, **parameters}
        translation(op_type)(function)
