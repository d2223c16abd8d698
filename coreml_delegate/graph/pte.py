"""A ``.pte`` of one Core ML delegate that runs a graph, so that ExecuTorch apps run it.

ExecuTorch makes the file from a *lowered module*, which takes the types of its inputs and outputs
from an exported program. Here that program computes zeros of the right shapes; the delegate
replaces all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from coreml_delegate.errors import LoweringError
from coreml_delegate.formats.blob import Files, flatten
from coreml_delegate.formats.blob_layout import MethodMetadata, identify
from coreml_delegate.graph.tensor_types import Dimension, DType, TensorType
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import quiet_import

# Element types that the device runtime converts at a delegate's boundary; the others cross as their
# storage dtype. See ``lowering.contract.BOUNDARY_DTYPES``.
_CONVERTED = {
    DType.BOOL: torch.bool,
    DType.UINT8: torch.uint8,
    DType.INT16: torch.int16,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.FLOAT16: torch.float16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
}


def delegate_program(
    model: Files,
    parameters: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType],
    dimensions: Mapping[str, Dimension],
    options: CompileOptions,
) -> bytes:
    """Return the content of a ``.pte`` whose method ``forward`` is a single Core ML delegate.

    Element types that the device runtime does not convert (int8, uint16, uint32, uint64) are int32
    in the program, with the same bits.

    Args:
        model: Files of the model, as in a blob.
        parameters: Types of the inputs by feature name, in order.
        outputs: Types of the outputs by feature name, in order.
        dimensions: Ranges of symbolic sizes, by name.
        options: Options that the model was lowered with.

    Raises:
        LoweringError: An input or output without elements, which Core ML does not have.
    """
    for name, type in {**parameters, **outputs}.items():
        if type.is_empty:
            raise LoweringError(f"{name!r} has no elements", got=str(type), expected="one or more")
    with quiet_import():
        from executorch.exir import EdgeCompileConfig, to_edge
        from executorch.exir.lowered_backend_module import LoweredBackendModule

        from coreml_delegate.backend import CoreMLBackend
    _, files = identify(model, {"": MethodMetadata(tuple(parameters), tuple(outputs))})
    input_types = list(parameters.values())
    zeros = _export(_zeros(input_types, list(outputs.values())), input_types, dimensions)
    config = EdgeCompileConfig(_check_ir_validity=False)
    lowered = LoweredBackendModule(
        to_edge(zeros, compile_config=config).exported_program(),
        CoreMLBackend.__name__,
        flatten(files),
        options.to_specs(),
    )
    program = to_edge(_export(_Call(lowered), input_types, dimensions), compile_config=config)
    return program.to_executorch().buffer


class _Call(torch.nn.Module):
    """Calls a lowered module."""

    def __init__(self, lowered: Any) -> None:
        super().__init__()
        self.lowered = lowered

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.lowered(*inputs)


def _zeros(
    input_types: Sequence[TensorType], output_types: Sequence[TensorType]
) -> torch.nn.Module:
    """Return a module with a graph's input types that returns zeros of its output types."""
    symbols: dict[Any, tuple[int, int]] = {
        size: (position, axis)
        for position, type in reversed(list(enumerate(input_types)))
        for axis, size in enumerate(type.shape)
        if isinstance(size, sympy.Symbol)
    }

    class Zeros(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            sizes = {s: inputs[position].shape[axis] for s, (position, axis) in symbols.items()}
            return tuple(
                torch.zeros([_evaluate(d, sizes) for d in type.shape], dtype=_torch_dtype(type))
                for type in output_types
            )

    return Zeros()


def _export(
    module: torch.nn.Module, input_types: Sequence[TensorType], dimensions: Mapping[str, Dimension]
) -> torch.export.ExportedProgram:
    dims: dict[Any, Any] = {
        dimension.symbol: torch.export.Dim(name, min=dimension.least, max=dimension.most)
        for name, dimension in dimensions.items()
    }
    examples = tuple(
        torch.zeros([_example(size, dimensions) for size in type.shape], dtype=_torch_dtype(type))
        for type in input_types
    )
    dynamic = tuple(
        {axis: dims[size] for axis, size in enumerate(type.shape) if size in dims}
        for type in input_types
    )
    shapes = (dynamic,) if any(dynamic) else None
    return torch.export.export(module, examples, dynamic_shapes=shapes)


def _evaluate(size: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    if isinstance(size, int):
        return size
    return sympy.lambdify(list(sizes), size, modules="math")(*sizes.values())


def _example(size: Any, dimensions: Mapping[str, Dimension]) -> int:
    if not isinstance(size, sympy.Symbol):
        return int(size)
    dimension = dimensions[size.name]
    # torch specializes sizes of 0 and 1.
    return min(max(dimension.least, 3), dimension.most)


def _torch_dtype(type: TensorType) -> torch.dtype:
    return _CONVERTED.get(type.dtype, torch.int32)
