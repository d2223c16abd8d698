"""Weights that torchao's ``quantize_`` left as integers, or as indices into lookup tables.

Core ML has them as constants that are dequantized when they are used; they are stored as they are.
No kernel of ExecuTorch runs these ops on the CPU. The rewrites turn them into operators that say
how MIL stores them: what coremltools makes of torchao's own is limited to matrices with 4 or 8
bits, and scales the wrong dimension below iOS18 (apple/coremltools#2589).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from coreml_delegate.errors import ConversionError
from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.call import (
    DEQUANTIZE_AFFINE,
    DEQUANTIZE_CODEBOOK,
    FLOAT,
    INTEGER,
    MAX_RANK,
    OpCall,
    Reason,
    ReasonCode,
)
from coreml_delegate.ops.constants import casts_codes
from coreml_delegate.ops.constraints import IsConstant, rank_between
from coreml_delegate.ops.edits import arguments_of, become, value_of
from coreml_delegate.ops.record import Constraint, OpRecord
from coreml_delegate.targets import Opset

_BYTES = frozenset({torch.int8, torch.uint8})
_STORED = tuple(torch.iinfo(dtype) for dtype in (torch.int8, torch.uint8))
_NARROW_BITS = 4
_MAX_INDEX_BITS = 8


def limits(call: OpCall) -> tuple[int, int] | None:
    """Smallest and largest quantized value of a ``dequantize_affine``; None if not integers."""
    low, high = call.arguments["quant_min"], call.arguments["quant_max"]
    dtype = call.arguments["input_dtype"]
    if low is None or high is None:
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point:
            return None
        whole = torch.iinfo(dtype)
        low, high = whole.min if low is None else low, whole.max if high is None else high
    return (int(low), int(high)) if int(low) == low and int(high) == high else None


def blocks(shape: torch.Size, block_size: list[int]) -> tuple[int, ...] | None:
    """How many blocks each dimension has, -1 being a whole one; None if they do not divide it."""
    if len(block_size) != len(shape):
        return None
    sizes = [size if block == -1 else block for size, block in zip(shape, block_size, strict=True)]
    if any(size < 1 or whole % size for whole, size in zip(shape, sizes, strict=True)):
        return None
    return tuple(whole // size for whole, size in zip(shape, sizes, strict=True))


def _blocks_of(call: OpCall, name: str) -> tuple[int, ...] | None:
    tensor = call.tensor(name)
    return None if tensor is None else blocks(tensor.shape, list(call.arguments["block_size"]))


def _range_fits(call: OpCall) -> Reason | None:
    found = limits(call)
    if found is not None and any(t.min <= found[0] and found[1] <= t.max for t in _STORED):
        return None
    low, high = call.arguments["quant_min"], call.arguments["quant_max"]
    text = f"its values are {low} .. {high}, Core ML has integers of at most 8 bits"
    return Reason(ReasonCode.ARGUMENT, text)


def _scales_fit(call: OpCall) -> Reason | None:
    count = _blocks_of(call, "input")
    for name in ("scale", "zero_point"):
        tensor = call.tensor(name)
        if tensor is None:
            continue
        wanted = torch.Size(count or ()).numel()
        if count is None or tensor.numel() != wanted:
            given = f"{tuple(tensor.shape)}, block_size={list(call.arguments['block_size'])}"
            return Reason(ReasonCode.SHAPE, f"{name!r} has not one value per block: {given}")
    return None


def _is_blockwise(call: OpCall, count: tuple[int, ...]) -> bool:
    """Whether scales are finer than one for each index of one dimension."""
    data = call.tensor("input")
    shape = () if data is None else data.shape
    return sum(n > 1 for n in count) > 1 or any(
        1 < n < whole for n, whole in zip(count, shape, strict=True)
    )


def _demand_of_integers(call: OpCall) -> tuple[Opset, str] | None:
    """Four bits, blocks, and zero points that are floats came with iOS18."""
    found, count = limits(call), _blocks_of(call, "input")
    if found is not None and found[1] - found[0] < 2**_NARROW_BITS:
        return Opset.iOS18, f"weights of {(found[1] - found[0]).bit_length()} bits"
    if count is not None and _is_blockwise(call, count):
        return Opset.iOS18, f"a scale per block of {list(call.arguments['block_size'])}"
    zero_point = call.tensor("zero_point")
    if zero_point is not None and zero_point.dtype.is_floating_point:
        return Opset.iOS18, "zero points that are floats"
    return None


def _tables_fit(call: OpCall) -> Reason | None:
    tables, bits = call.tensor("codebook"), call.arguments["nbits"]
    if tables is None or not 1 <= bits <= _MAX_INDEX_BITS:
        return Reason(ReasonCode.ARGUMENT, f"nbits={bits}, Core ML has indices of 1 to 8 bits")
    count, shape = _blocks_of(call, "codes"), tuple(tables.shape)
    if count is None or shape[:-1] != (*count, 2**bits):
        given = f"{shape}, nbits={bits}, block_size={list(call.arguments['block_size'])}"
        return Reason(ReasonCode.SHAPE, f"'codebook' has not one table per block: {given}")
    if shape[-1] != 1:
        return Reason(ReasonCode.SHAPE, f"'codebook' holds vectors of {shape[-1]}, not numbers")
    if sum(n > 1 for n in count) > 1:
        text = f"tables along several dimensions ({count}), Core ML takes them along one"
        return Reason(ReasonCode.SHAPE, text)
    return None


def _shift_scale(node: Node) -> None:
    """One scale, and perhaps one zero point, per block."""
    arguments, extent = arguments_of(node), limits(OpCall.of(node))
    data, scale, zero_point = (arguments[name] for name in ("input", "scale", "zero_point"))
    count = blocks(value_of(data).shape, list(arguments["block_size"]))
    if count is None or extent is None:
        raise ConversionError("blocks of weights that do not fit", got=str(node.format_node()))
    become(node, mil_ops.shift_scale(), data, scale, zero_point, list(count), *extent)


def _look_up(node: Node) -> None:
    """The indices as they are stored: torchao widens them to look them up itself."""
    arguments = arguments_of(node)
    codes = arguments["codes"]
    source = codes.args[0] if casts_codes(codes) else codes
    become(node, mil_ops.look_up(), source, arguments["codebook"])


_CONSTANTS: tuple[Constraint, ...] = tuple(map(IsConstant, ("input", "scale", "zero_point")))

RECORDS = (
    OpRecord(
        DEQUANTIZE_AFFINE,
        dtypes={
            "input": _BYTES | INTEGER,
            "scale": FLOAT,
            "zero_point": _BYTES | INTEGER | FLOAT,
        },
        results=FLOAT,
        constraints=(*_CONSTANTS, rank_between("input", 1, MAX_RANK), _range_fits, _scales_fit),
        since=Opset.iOS16,
        demand=_demand_of_integers,
        alone=False,
        rewrite=_shift_scale,
    ),
    OpRecord(
        DEQUANTIZE_CODEBOOK,
        dtypes={
            "codes": _BYTES | INTEGER,
            "codebook": frozenset({torch.float16, torch.float32, torch.float64}),
        },
        results=FLOAT,
        constraints=(IsConstant("codes"), IsConstant("codebook"), _tables_fit),
        # A table, and the dimension that indexes it, are two more than the weight's.
        max_rank=MAX_RANK + 2,
        since=Opset.iOS18,
        alone=False,
        rewrite=_look_up,
    ),
)
