"""Weights compressed by ``quantize_``: protect, translate, restore.

ExecuTorch has no kernel for the op that dequantizes weights compressed by ``quantize_``.
Undelegated calls are therefore decomposed into ops with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import OptionError
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.compressed import (
    emit_look_up,
    index_bits,
    is_blockwise,
    numpy_type,
)
from coreml_delegate.ops import Reason, ReasonCode, obstacle
from coreml_delegate.ops.call import DECOMPRESS, DEQUANTIZE_AFFINE, target_name
from coreml_delegate.ops.compressed import blocks
from coreml_delegate.ops.constants import is_derived, stored_nodes
from coreml_delegate.ops.edits import arguments_of, become, insert, shape_of, value_of
from coreml_delegate.ops.mil_ops import value_in
from coreml_delegate.patches.torch import is_traceable_wrapper_subclass
from coreml_delegate.targets import Opset

_ATEN: Any = torch.ops.aten
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")
# These have no kernel: they replace an op with the same result before conversion.
_LIBRARY.define(
    "shift_scale(Tensor data, Tensor scale, Tensor? offset, int[] blocks, int low, int high)"
    " -> Tensor"
)
_LIBRARY.define("look_up(Tensor indices, Tensor tables) -> Tensor")

_Array = NDArray[Any]
_TABLE_BITS = 6  # of the widest indices that are narrower than a byte
_TABLE_BYTES = 2  # of a value in fp16
BYTES = ("int8", "uint8")
INTEGERS = ("int4", "uint4", *BYTES)


def unwrap_tensor_subclasses(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with the inner tensors of tensor subclasses as separate parameters.

    Args:
        program: In ATen dialect; it is not changed.
    """
    if not any(map(is_traceable_wrapper_subclass, program.state_dict.values())):
        return program
    return program.run_decompositions({})


def dequantize_per_use(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with a separate dequantizing call for each use of dequantized weights.

    Each partition that uses them then has the compressed weights as a constant.

    Args:
        program: In ATen dialect, unwrapped; it is not changed.
    """
    if not _reused_calls(program):
        return program
    copied = program.run_decompositions({})
    for node in _reused_calls(copied):
        _, *later_users = node.users
        for user in later_users:
            with node.graph.inserting_before(node):
                copy_of_call = node.graph.node_copy(node)
            user.replace_input_with(node, copy_of_call)
    # The arguments of the copied calls may be dequantized themselves.
    return dequantize_per_use(copied)


def _reused_calls(program: ExportedProgram) -> list[Node]:
    constants = stored_nodes(program)
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return [node for node in calls if len(node.users) > 1 and is_derived(node, constants)]


def decompose_undelegated_dequantize(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program`` with every refused ``dequantize_affine`` decomposed into arithmetic.

    Args:
        program: In ATen dialect, unwrapped; it is not changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.

    Raises:
        OptionError: Core ML refuses a call only because of the deployment target.
    """
    refused = _refused(program, target, veto, constants_inside)
    require_target(refused)
    if not any(target_name(node.target) == DEQUANTIZE_AFFINE for node in refused):
        return program
    copied = program.run_decompositions({})
    for node in _refused(copied, target, veto, constants_inside):
        if target_name(node.target) == DEQUANTIZE_AFFINE:
            _decompose(node)
    copied.graph_module.recompile()
    return copied


def require_target(refused: Mapping[Node, Reason]) -> None:
    """Check that the deployment target is high enough for the weights of the model.

    Args:
        refused: The calls that Core ML refuses, each with the reason.

    Raises:
        OptionError: It is too low; the CPU has no kernel for such weights either.
    """
    too_old = {
        node: reason
        for node, reason in refused.items()
        if target_name(node.target) in DECOMPRESS and reason.code is ReasonCode.OPSET
    }
    if not too_old:
        return
    reasons = dict.fromkeys(f"{reason} ({reason.remedy})" for reason in too_old.values())
    raise OptionError(
        "the deployment target is too low for the model's compressed weights",
        got="; ".join(reasons),
        remedy="Pass compile_specs=CoreMLBackend.generate_compile_specs("
        "minimum_deployment_target=ct.target.iOS18) to CoreMLPartitioner, or no target: the "
        "smallest that the model needs is demanded then",
    )


def _refused(
    program: ExportedProgram,
    target: Opset | None,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool,
) -> dict[Node, Reason]:
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    calls = (n for n in program.graph.nodes if target_name(n.target) in DECOMPRESS)
    verdicts = ((node, veto(node) or obstacle(node, target, constants)) for node in calls)
    return {node: reason for node, reason in verdicts if reason is not None}


def _decompose(node: Node) -> None:
    """Replace a call by ``scale * (input - zero_point)``, with dimensions split into blocks."""
    arguments, shape = arguments_of(node), shape_of(node)
    block_counts = blocks(torch.Size(shape), list(arguments["block_size"]))
    if block_counts is None:
        return  # torch cannot compute such blocks either
    split_shape = [
        n for size, count in zip(shape, block_counts, strict=True) for n in (count, size // count)
    ]
    scale_shape = [n for count in block_counts for n in (count, 1)]

    def floats(name: str, sizes: list[int]) -> Node:
        cast = insert(node, _ATEN._to_copy.default, arguments[name], dtype=torch.float32)
        return insert(node, _ATEN.view.default, cast, sizes)

    values = floats("input", split_shape)
    if arguments["zero_point"] is not None:
        values = insert(node, _ATEN.sub.Tensor, values, floats("zero_point", scale_shape))
    values = insert(node, _ATEN.mul.Tensor, values, floats("scale", scale_shape))
    values = insert(node, _ATEN.view.default, values, shape)
    become(node, _ATEN._to_copy.default, values, dtype=value_of(node).dtype)


# Translation


def _translate_shift_scale(context: Any, node: Any) -> None:
    data, scale, offset, blocks, low, high = (value_in(context, name) for name in node.inputs)
    shape = tuple(int(count) for count in blocks)
    scale = np.reshape(scale, shape)
    offset = None if offset is None else np.reshape(offset, shape)
    context.add(emit_shift_scale(data, scale, offset, (int(low), int(high)), node.name))


def _translate_look_up(context: Any, node: Any) -> None:
    indices, tables = (value_in(context, name) for name in node.inputs)
    context.add(emit_look_up(indices, tables.astype(np.float32), None, node.name))


def emit_shift_scale(
    data: Any,
    scale: _Array,
    offset: _Array | None,
    value_range: tuple[int, int],
    name: str,
) -> Any:
    """Emit ``scale * (data - offset)`` of constants, with data in the fewest bits of MIL.

    Args:
        data: Integers [*shape].
        scale: A number per block, of the rank of ``data``.
        offset: Of the shape of ``scale``, or None for 0.
        value_range: Smallest and largest value that ``data`` may have.
        name: Of the result.
    """
    scale = np.asarray(scale, np.float32)
    offset = None if offset is None or not np.any(offset) else offset
    low, high = min(value_range[0], int(data.min())), max(value_range[1], int(data.max()))
    if is_blockwise() and _saves_as_tables(data.size, scale.shape, high - low + 1):
        values = np.arange(low, high + 1, dtype=np.float32)
        shifted = values if offset is None else values - np.asarray(offset, np.float32)[..., None]
        tables = scale[..., None] * shifted
        return emit_look_up(data.astype(np.int32) - low, tables[..., None], None, name)
    data, offset = narrow(data, offset, value_range, INTEGERS if is_blockwise() else BYTES)
    if is_blockwise():
        offset_option = {} if offset is None else {"offset": offset}
        return mb.constexpr_blockwise_shift_scale(
            data=data, scale=scale, name=name, **offset_option
        )
    if offset is not None and not np.issubdtype(offset.dtype, np.integer):
        raise ValueError("zero points that are no integers of the weights' type need iOS18")
    axis = next((axis for axis, count in enumerate(scale.shape) if count > 1), 0)
    offset = np.zeros(scale.shape, data.dtype) if offset is None else offset
    scale, offset = (
        parameter.reshape(-1) if parameter.size > 1 else parameter.reshape(())
        for parameter in (scale, offset)
    )
    return mb.constexpr_affine_dequantize(
        quantized_data=data, scale=scale[()], zero_point=offset[()], axis=np.int32(axis), name=name
    )


def _saves_as_tables(size: int, blocks: Sequence[int], entries: int) -> bool:
    """Whether weights take less memory as indices into tables of the products.

    Core ML has integers of 4 and 8 bits, and indices of fewer. Its tables lie along one dimension.

    Args:
        size: Number of weights.
        blocks: Number of scales per dimension.
        entries: Number of values that an integer may have.
    """
    if entries > 2**_TABLE_BITS or sum(count > 1 for count in blocks) > 1:
        return False
    integer_bits = 4 if entries <= 2**4 else 8
    saved = size * (integer_bits - index_bits(entries)) // 8
    return saved > np.prod(blocks) * 2 ** index_bits(entries) * _TABLE_BYTES


def narrow(
    data: _Array, offset: _Array | None, value_range: tuple[int, int], labels: Sequence[str]
) -> tuple[_Array, _Array | None]:
    """Return data in the first type that fits, and offset in the same type, or else in fp32."""
    low, high = min(value_range[0], int(data.min())), max(value_range[1], int(data.max()))
    for label in labels:
        least, most = _limits(label)
        if least <= low and high <= most:
            dtype = numpy_type(label)
            if offset is None:
                return data.astype(dtype), None
            is_integer = np.array_equal(offset, np.round(offset))
            fits = is_integer and least <= offset.min() and offset.max() <= most
            return data.astype(dtype), offset.astype(dtype if fits else np.float32)
    raise ValueError(f"weights of {low} .. {high}, Core ML has integers of at most 8 bits")


def _limits(label: str) -> tuple[int, int]:
    """Return the smallest and largest value of an integer type."""
    sign, _, bits = label.rpartition("int")
    count_of_values = 2 ** int(bits)
    return (0, count_of_values - 1) if sign else (-count_of_values // 2, count_of_values // 2 - 1)


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    "coreml_delegate::shift_scale": _translate_shift_scale,
    "coreml_delegate::look_up": _translate_look_up,
}
"""Translations of our ops; each takes coremltools' context and the node."""
