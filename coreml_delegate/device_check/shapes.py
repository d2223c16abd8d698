"""Rules on shapes: sizes, ranks, layout, and dynamic shapes."""

from __future__ import annotations

from collections.abc import Iterator

from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView, tensors
from coreml_delegate.device_check.records import (
    Consequence,
    Details,
    Place,
    Rewrite,
    Rule,
    each_function,
    each_value,
    obstacle_to_leaving,
    view_details,
)
from coreml_delegate.lowering.states import make_states
from coreml_delegate.mil.passes.for_devices import flattened_as_convolution
from coreml_delegate.partition.grouping.moved_calls import moved_calls
from coreml_delegate.partition.grouping.mutable_buffers import obstacle_to_all_states
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Op, TensorType
from coreml_delegate.targets import (
    LARGEST_DIMENSION,
    PADDING_THAT_COUNTS,
    STATE_WIDTH,
    Device,
    padding_of,
)
from coreml_delegate.transforms.for_devices import shape_for_neural_engine

LARGEST_RANK = 5
"""Largest rank of a tensor on the neural engine."""

_NORM = "layer_norm"
_LAYER = "linear"
_FLATTENING = "reshape"


def _large_dimensions(view: FunctionView) -> Iterator[tuple[str, Place]]:
    for feature in view.function.inputs:
        sizes = [size for shape in feature.shapes for size in shape]
        sizes += [high or low for low, high in feature.bounds]
        sizes += [size for size in feature.type.shape or () if size is not None]
        if max(sizes, default=0) > LARGEST_DIMENSION:
            yield str(max(sizes)), Place("input", feature.name)
    for op in view.ops:
        for _, kind in tensors(op.outputs):
            largest = max((size for size in kind.shape or () if size), default=0)
            if largest > LARGEST_DIMENSION:
                yield str(largest), Place.of(view, op)


def _obstacle_to_splitting(view: FunctionView, op: Op) -> str | None:
    """Return why ``--for`` leaves a large dimension.

    Layers are split, a layer of a flattened image becomes a convolution, and other ops leave.
    """
    users = [user for output in op.outputs for user in view.users.get(output.name, ())]
    is_flattening = op.type == _FLATTENING and {user.type for user in users} == {_LAYER}
    return None if op.type == _LAYER or is_flattening else obstacle_to_leaving(view, op)


def _state_widths(view: FunctionView) -> Iterator[Details]:
    for state in view.function.states:
        shape = state.type.shape or ()
        if shape and shape[-1] is not None and shape[-1] % STATE_WIDTH:
            yield view_details(view, str(state.type), [Place("state", state.name)])


def _ranges(view: FunctionView) -> Iterator[Details]:
    for feature in view.function.inputs:
        if feature.shapes or all(low == high for low, high in feature.bounds):
            continue
        sizes = ", ".join(_range(low, high) for low, high in feature.bounds)
        got = f"{feature.type.dtype.label}[{sizes}]"
        yield view_details(view, got, [Place("input", feature.name)])


def _range(low: int, high: int | None) -> str:
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


def _computed_shapes(view: FunctionView) -> Iterator[tuple[str, Place]]:
    if view.enumerates_shapes or view.has_ranges:
        return  # sizes are unknown because input sizes are
    for op in view.ops:
        for _, kind in tensors(op.outputs):
            if _introduces_unknown(view, op, kind):
                yield str(kind), Place.of(view, op)


def _introduces_unknown(view: FunctionView, op: Op, kind: TensorType) -> bool:
    """Whether a result of an op has an unknown size, but no operand has."""
    if not _is_unknown(kind):
        return False
    types = (view.tensor_of(binding) for bindings in op.inputs.values() for binding in bindings)
    return not any(type_ is not None and _is_unknown(type_) for type_ in types)


def _is_unknown(kind: TensorType) -> bool:
    return kind.shape is None or None in kind.shape


def _enumerated_norms(view: FunctionView) -> Iterator[Details]:
    if view.enumerates_shapes:
        norms = [Place.of(view, op) for op in view.ops if op.type == _NORM]
        if norms:
            shapes = max(len(feature.shapes) for feature in view.function.inputs)
            got = f"{len(norms)} with {shapes} enumerated shapes"
            yield view_details(view, got, norms)


def _states_and_ranges(view: FunctionView) -> Iterator[Details]:
    flexible = [f for f in view.function.inputs if any(low != high for low, high in f.bounds)]
    fixed = [f for f in view.function.inputs if f not in flexible and not f.shapes]
    if view.function.states and flexible and fixed:
        got = f"{len(flexible)} inputs with ranges, {len(fixed)} fixed"
        yield view_details(view, got, (Place("input", feature.name) for feature in flexible))


def _high_ranks(view: FunctionView) -> Iterator[tuple[str, Place]]:
    for op in view.ops:
        for _, kind in tensors(op.outputs):
            if kind.shape is not None and len(kind.shape) > LARGEST_RANK:
                yield f"rank {len(kind.shape)}", Place.of(view, op)


def _narrow_axes(view: FunctionView) -> Iterator[Details]:
    function = view.function
    for role, features in (
        ("input", function.inputs),
        ("output", function.outputs),
        ("state", function.states),
    ):
        for feature in features:
            factor = _padding(feature.type)
            if factor >= PADDING_THAT_COUNTS:
                got = f"{feature.type}, {factor:g} times the memory"
                yield view_details(view, got, [Place(role, feature.name)])


def _padding(kind: TensorType) -> float:
    """Return padded size / size of a tensor whose last axis is padded to 64 bytes."""
    # The neural engine computes in fp16, whatever the type of the boundary.
    bits = DType.FP16.bits if kind.dtype.is_float else kind.dtype.bits
    *sizes, width = kind.shape or (None,)
    return padding_of([*(size or 1 for size in sizes), width or 0], bits)


RULES = (
    Rule(
        name="large-dimension",
        finds=f"a dimension above {LARGEST_DIMENSION:,}",
        reason="The largest dimension of a tensor on the neural engine is 16,384 on A13 to A15, M1 "
        "and M2, and 65,536 on later chips; matrix products beyond it are refused.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Split the dimension, for example the output features of the last linear layer, "
        "and concatenate outside of the delegate",
        sources=(sources.DIMENSIONS, sources.LARGEST_TENSOR),
        examine=each_value(_large_dimensions),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (shape_for_neural_engine, flattened_as_convolution, moved_calls),
            "for linear layers, and what is cheap at the ends",
            _obstacle_to_splitting,
        ),
    ),
    Rule(
        name="state-width",
        finds=f"a state whose last dimension is no multiple of {STATE_WIDTH}",
        reason="A stateful model whose state has a width that is no multiple of 32 fails on the "
        "neural engine; it was seen on macOS 15.2 with an M4, where CPU and GPU run it.",
        consequence=Consequence.FAILS,
        remedy="Pad the buffer's last dimension to a multiple of 32, or pass it in and out "
        "(take_over_mutable_buffer=False)",
        sources=(sources.STATE_WIDTH,),
        examine=each_function(_state_widths),
        rewrite=Rewrite((Device.NEURAL_ENGINE,), (make_states,)),
    ),
    Rule(
        name="flexible-input",
        finds="an input that takes a range of sizes",
        reason="Of a model with ranges, only the default shape runs on the neural engine; other "
        "shapes run on the GPU or the CPU. With enumerated shapes each can run there.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Enumerate the shapes (export --enumerated-shapes), or export one program for each",
        sources=(sources.RANGES,),
        examine=each_function(_ranges),
    ),
    Rule(
        name="computed-shape",
        finds="a result whose size is known at run time only",
        reason="The neural engine takes fully static shapes.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Replace the operation by one with a fixed result, a mask say, or leave it to the "
        "CPU (skip_ops_for_coreml_delegation)",
        sources=(sources.AUTHORING_RULES,),
        examine=each_value(_computed_shapes),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (moved_calls,),
            "if ExecuTorch has a kernel and it splits no partition",
            obstacle_to_leaving,
        ),
    ),
    Rule(
        name="enumerated-layer-norm",
        finds="layer_norm in a program with enumerated shapes",
        reason="A model of a layer norm and a matrix product did not run on the neural engine with "
        "enumerated shapes, and did with a fixed shape (reported in July 2023).",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Export one program for each shape, or look at the compute plan on a Mac "
        "(--compute-plan)",
        sources=(sources.ENUMERATED_NORM,),
        examine=each_function(_enumerated_norms),
    ),
    Rule(
        name="state-with-range",
        finds="states beside both fixed inputs and inputs with ranges",
        reason="A stateful model with a mix of fixed inputs and inputs with ranges ends the "
        "process when it is loaded.",
        consequence=Consequence.FAILS,
        remedy="Give all inputs fixed shapes, or pass the buffers in and out "
        "(take_over_mutable_buffer=False)",
        sources=(sources.STATE_AND_RANGE,),
        examine=each_function(_states_and_ranges),
        neural_engine=False,
        rewrite=Rewrite(tuple(Device), (obstacle_to_all_states,)),
    ),
    Rule(
        name="high-rank",
        finds=f"a tensor of more than {LARGEST_RANK} dimensions",
        reason="The neural engine rejects intermediate tensors of rank 6 and above.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Merge or drop dimensions, so that five are left",
        sources=(sources.AUTHORING_RULES,),
        examine=each_value(_high_ranks),
    ),
    Rule(
        name="narrow-last-axis",
        finds="an input, output or state whose last axis is short",
        reason="The last axis of a buffer is padded to 64 bytes on the neural engine: one element "
        "of fp16 in the last axis takes 32 times its memory.",
        consequence=Consequence.SLOWER,
        remedy="Transpose the tensor, so that a dimension of 32 elements or more comes last",
        sources=(sources.TRANSFORMERS, sources.AUTHORING_RULES),
        examine=each_function(_narrow_axes),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (shape_for_neural_engine,),
            "for inputs and outputs of the program",
        ),
    ),
)
