"""Custom torch ops for MIL ops that coremltools' frontend does not emit.

Rewrites insert them into a subgraph; their translations hold while we convert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from coreml_delegate.mil.compose import division, mb
from coreml_delegate.ops.record import Translation
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.patches.torch import OpOverload
from coreml_delegate.targets import Opset

_NAMESPACE = "coreml_delegate"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("integers(int[] values) -> Tensor")
# It has no kernel: it replaces an op with the same result before conversion.
_LIBRARY.define("truncate_divide(Tensor self, Tensor other) -> Tensor")
_SCATTER_MODES = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


_LIBRARY.impl("integers", _integers, "CompositeImplicitAutograd")


def truncate_divide() -> Any:
    """``x / y`` rounded towards zero.

    Returns:
        The operator, taking two tensors of one dtype, or a tensor and a number.
    """
    return torch.ops.coreml_delegate.truncate_divide.default


def integers() -> Any:
    """A constant vector, for rewrites, which cannot add constants to the program.

    Returns:
        The operator, taking the integers as a list.
    """
    return torch.ops.coreml_delegate.integers.default


def scatter_reduce() -> Any:
    """Scatter with reduction, as MIL's ``scatter_along_axis``.

    Returns:
        ATen's operator, which includes ``self`` and takes a sum, product, maximum or minimum.
    """
    return torch.ops.aten.scatter_reduce.two


def sliding_windows() -> Any:
    """Windows along one dimension, whose elements become the last dimension, as one op."""
    return torch.ops.aten.unfold_copy.default


def shift_scale() -> Any:
    """``scale * (data - offset)`` of constants, with data in the narrowest integer type of MIL.

    Returns:
        The operator. It takes ``data``, integers of ``low`` to ``high``; ``scale`` and ``offset``,
        a value per block, the offset or None for 0; and ``blocks``, the number of blocks along
        every dimension.
    """
    return torch.ops.coreml_delegate.shift_scale.default


def look_up() -> Any:
    """Lookup of constant indices in constant tables, with indices in the fewest bits of MIL.

    Returns:
        The operator, taking ``indices`` [*shape] and ``tables`` [*blocks, 2**bits, 1].
    """
    return torch.ops.coreml_delegate.look_up.default


def recorded_weight() -> Any:
    """A weight with the compression that ``coremltools.optimize.torch`` recorded for it.

    Returns:
        The operator, which returns ``weight``; see ``opaque_ops.recorded_compression`` for the
        other arguments, which say how Core ML stores it.
    """
    return torch.ops.coreml_delegate.recorded_weight.default


def placeholder_op(overload: OpOverload) -> OpOverload:
    """Recurrent layers, which coremltools unrolls or does not translate.

    Returns:
        Its placeholder op; see ``opaque_ops.recurrent_layers``.
    """
    _, name, overload_name = str(overload).split(".")
    return getattr(getattr(torch.ops.coreml_delegate, name), overload_name)


def nms() -> OpOverload:
    """Non-maximum suppression of boxes with two corners; see ``detection.nms``.

    Returns:
        The operator, which models may also call themselves.
    """
    return torch.ops.coreml_delegate.nms.default


def _translate_nms(context: Any, node: Any) -> None:
    boxes, scores = (context[name] for name in node.inputs[:2])
    threshold, count, per_class = (value_in(context, name) for name in node.inputs[2:])
    limits = float(threshold), int(count), bool(per_class)
    context.add(_emit_nms(boxes, scores, *limits), torch_name=node.name)


def _translate_integers(context: Any, node: Any) -> None:
    values = np.asarray(value_in(context, node.inputs[0]), np.int32)
    context.add(mb.const(val=values, name=node.name))


def _translate_scatter_reduce(context: Any, node: Any) -> None:
    data, axis, indices, updates, reduce = node.inputs[:5]
    tensors = {"data": data, "indices": indices, "updates": updates}
    operands = {operand: context[name] for operand, name in tensors.items()}
    options = {"axis": int(value_in(context, axis)), "mode": _SCATTER_MODES[reduce]}
    context.add(mb.scatter_along_axis(**operands, **options, name=node.name))


def _translate_unfold(context: Any, node: Any) -> None:
    x = context[node.inputs[0]]
    axis, size, step = (int(value_in(context, name)) for name in node.inputs[1:])
    windows = mb.sliding_windows(x=x, axis=axis, size=size, stride=step)
    order = [*range(axis + 1), *range(axis + 2, x.rank + 1), axis + 1]
    context.add(mb.transpose(x=windows, perm=order, name=node.name))


def kind_of(target: str) -> str:
    """Return the name by which coremltools looks up the translation of a torch op."""
    coremltools()
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind

    return str(sanitize_op_kind(target))


def translation_of(function: Translation) -> Callable[[Any, Any], None]:
    """Return the translation of a call of an op by a composition of MIL ops."""

    def translate(context: Any, node: Any) -> None:
        operands = (_operand(context, name) for name in node.inputs)
        context.add(function(*operands), torch_name=node.name)

    return translate


def _operand(context: Any, name: Any) -> Any:
    """Return an argument as a MIL variable; numbers in Core ML's dtypes."""
    if isinstance(name, str):
        return context[name]
    if isinstance(name, tuple):
        return [_operand(context, item) for item in cast("tuple[Any, ...]", name)]
    if name is None:
        return None
    return np.float32(name) if isinstance(name, float) else np.int32(name)


def value_in(context: Any, name: Any) -> Any:
    """Return an argument's value: a MIL variable, or the numpy array of a constant."""
    value = context[name] if isinstance(name, str) else name
    return getattr(value, "val", value)


def _emit_nms(
    boxes: Any,
    scores: Any,
    threshold: float,
    count: int,
    per_class: bool,
) -> Any:
    """Emit ``non_maximum_suppression`` for corners [N, B, 4] and scores [N, B, K]."""
    from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

    near, far = mb.split(x=boxes, num_splits=2, axis=-1)
    sides = mb.sub(x=far, y=near)
    middle = mb.add(x=near, y=mb.mul(x=sides, y=np.float32(0.5)))
    boxes = mb.concat(values=[middle, sides], axis=-1)
    options: dict[str, Any] = {
        "iou_threshold": np.float32(threshold),
        "max_boxes": count,
        "per_class_suppression": per_class,
    }
    if is_current_opset_version_compatible_with(coremltools().target(int(Opset.iOS17))):
        boxes, scores = (mb.transpose(x=x, perm=[0, 2, 1]) for x in (boxes, scores))
    else:
        options["score_threshold"] = np.float32(np.finfo(np.float16).min)
    return mb.non_maximum_suppression(boxes=boxes, scores=scores, **options)[2]


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    f"{_NAMESPACE}::truncate_divide": translation_of(division.truncate_divide),
    f"{_NAMESPACE}::nms": _translate_nms,
    f"{_NAMESPACE}::integers": _translate_integers,
    "scatter_reduce.two": _translate_scatter_reduce,
    "unfold_copy": _translate_unfold,
}
"""Translations of these ops, by name; each takes coremltools' context and the node."""
