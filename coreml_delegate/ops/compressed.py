"""Weights that ``quantize_`` or ``coremltools.optimize.torch`` compressed.

Core ML stores integers, or indices into lookup tables, and dequantizes them when they are used.
ExecuTorch has no CPU kernels for torchao's ops. The rewrites turn them into operators that say how
MIL stores weights: coremltools' translation of torchao's own ops is limited to matrices with 4 or
8 bits, and scales the wrong dimension below iOS18 (apple/coremltools#2589).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from coreml_delegate.errors import ConversionError
from coreml_delegate.mil.compose.compressed import INDEX_BITS, index_bits
from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.call import (
    DEQUANTIZE_AFFINE,
    DEQUANTIZE_CODEBOOK,
    FLOAT,
    INTEGER,
    MAX_RANK,
    RECORDED_WEIGHT,
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
_BYTE_RANGES = tuple(torch.iinfo(dtype) for dtype in (torch.int8, torch.uint8))
_NARROW_BITS = 4
_INDEX_BITS_OF_IOS18 = 3
"""Widths of indices into lookup tables; those of 3 bits need iOS18."""


def limits(call: OpCall) -> tuple[int, int] | None:
    """Return smallest and largest value of a ``dequantize_affine``; None if not integers."""
    low, high = call.arguments["quant_min"], call.arguments["quant_max"]
    dtype = call.arguments["input_dtype"]
    if low is None or high is None:
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point:
            return None
        info = torch.iinfo(dtype)
        low, high = (info.min if low is None else low, info.max if high is None else high)
    return (int(low), int(high)) if int(low) == low and int(high) == high else None


def blocks(shape: torch.Size, block_size: list[int]) -> tuple[int, ...] | None:
    """Return the number of blocks per dimension; None if ``block_size`` does not divide ``shape``.

    A block size of -1 is the size of the dimension.
    """
    if len(block_size) != len(shape):
        return None
    sizes = [size if block == -1 else block for size, block in zip(shape, block_size, strict=True)]
    if any(block < 1 or size % block for size, block in zip(shape, sizes, strict=True)):
        return None
    return tuple(size // block for size, block in zip(shape, sizes, strict=True))


def scale_blocks(scale: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of blocks per dimension of a weight; None if ``scale`` does not fit.

    Args:
        scale: Shape of the scales. Trailing dimensions of size 1 may be missing or redundant.
        shape: Shape of the weight.
    """
    counts, redundant = tuple(scale[: len(shape)]), scale[len(shape) :]
    counts += (1,) * (len(shape) - len(counts))
    fits = all(n and not size % n for n, size in zip(counts, shape, strict=True))
    return counts if fits and all(n == 1 for n in redundant) else None


def _blocks_of(call: OpCall, name: str) -> tuple[int, ...] | None:
    tensor = call.tensor(name)
    return None if tensor is None else blocks(tensor.shape, list(call.arguments["block_size"]))


def _range_fits(call: OpCall) -> Reason | None:
    value_range = limits(call)
    if value_range is not None and any(
        t.min <= value_range[0] and value_range[1] <= t.max for t in _BYTE_RANGES
    ):
        return None
    low, high = call.arguments["quant_min"], call.arguments["quant_max"]
    text = f"its values are {low} .. {high}, Core ML has integers of at most 8 bits"
    return Reason(ReasonCode.ARGUMENT, text)


def _scales_fit(call: OpCall) -> Reason | None:
    blocks_per_dim = _blocks_of(call, "input")
    for name in ("scale", "zero_point"):
        tensor = call.tensor(name)
        if tensor is None:
            continue
        expected = torch.Size(blocks_per_dim or ()).numel()
        if blocks_per_dim is None or tensor.numel() != expected:
            got = f"{tuple(tensor.shape)}, block_size={list(call.arguments['block_size'])}"
            return Reason(ReasonCode.SHAPE, f"{name!r} has not one value per block: {got}")
    return None


def _is_blockwise(blocks_per_dim: tuple[int, ...], shape: torch.Size) -> bool:
    """Whether scales are finer than one per index of a single dimension."""
    return sum(count > 1 for count in blocks_per_dim) > 1 or any(
        1 < count < size for count, size in zip(blocks_per_dim, shape, strict=True)
    )


def _demand_of_integers(call: OpCall) -> tuple[Opset, str] | None:
    """iOS18 for weights of 4 bits, blockwise scales and floating zero points."""
    value_range, blocks_per_dim = limits(call), _blocks_of(call, "input")
    if value_range is not None and value_range[1] - value_range[0] < 2**_NARROW_BITS:
        return Opset.iOS18, f"weights of {(value_range[1] - value_range[0]).bit_length()} bits"
    data = call.tensor("input")
    if (
        data is not None
        and blocks_per_dim is not None
        and _is_blockwise(blocks_per_dim, data.shape)
    ):
        return Opset.iOS18, f"a scale per block of {list(call.arguments['block_size'])}"
    zero_point = call.tensor("zero_point")
    if zero_point is not None and zero_point.dtype.is_floating_point:
        return Opset.iOS18, "zero points that are floats"
    return None


def _record_fits(call: OpCall) -> Reason | None:
    weight, lut = call.tensor("weight"), call.tensor("lut")
    shape = () if weight is None else tuple(weight.shape)
    for name in ("scale", "zero_point", "lut_scale"):
        tensor = call.tensor(name)
        if tensor is not None and scale_blocks(tensor.shape, shape) is None:
            text = f"{name} of {list(tensor.shape)} does not fit the weight of {list(shape)}"
            return Reason(ReasonCode.SHAPE, text)
    return None if lut is None else _lut_fits(call, lut.shape, shape)


def _lut_fits(call: OpCall, lut: Sequence[int], shape: Sequence[int]) -> Reason | None:
    """Each group of weights has a table of at most 256 numbers or vectors."""
    *groups, entries, length = lut if len(lut) == len(shape) + 2 else (0, 0)
    sizes, axis = list(shape), call.arguments["vector_axis"]
    is_vector = length > 1
    divides = -len(sizes) <= axis < len(sizes) and not sizes[axis] % max(length, 1)
    if is_vector and divides:
        sizes[axis] //= length
    has_indices = 1 <= entries <= 2 ** INDEX_BITS[-1] and (divides or not is_vector)
    if not has_indices or scale_blocks(groups, sizes) is None:
        text = f"a lookup table of {list(lut)} does not fit the weight of {list(shape)}"
        return Reason(ReasonCode.SHAPE, text)
    if is_vector and call.arguments["is_sparse"]:
        return Reason(ReasonCode.ARGUMENT, "Core ML has no sparse weights of vectors")
    return None


def _demand_of_record(call: OpCall) -> tuple[Opset, str] | None:
    """iOS18 for all but one table of numbers, a scale of 8 bits per channel, and sparse floats."""
    weight, lut, scale = (call.tensor(name) for name in ("weight", "lut", "scale"))
    shape = torch.Size() if weight is None else weight.shape
    feature = None
    if call.arguments["is_sparse"] + (lut is not None) + (scale is not None) > 1:
        feature = "weights compressed twice"
    elif call.tensor("lut_scale") is not None:
        feature = "a lookup table with scales"
    elif lut is not None and lut.numel() != lut.shape[-2]:
        feature = "several lookup tables of a weight, or one of vectors"
    elif lut is not None and index_bits(lut.numel()) == _INDEX_BITS_OF_IOS18:
        feature = f"indices of {_INDEX_BITS_OF_IOS18} bits"
    elif scale is not None and call.arguments["bits"] <= _NARROW_BITS:
        feature = f"weights of {call.arguments['bits']} bits"
    elif scale is not None and _is_blockwise(scale_blocks(scale.shape, shape) or (), shape):
        feature = "a scale per block"
    return None if feature is None else (Opset.iOS18, feature)


def _tables_fit(call: OpCall) -> Reason | None:
    tables, bits = call.tensor("codebook"), call.arguments["nbits"]
    if tables is None or not 1 <= bits <= INDEX_BITS[-1]:
        return Reason(ReasonCode.ARGUMENT, f"nbits={bits}, Core ML has indices of 1 to 8 bits")
    blocks_per_dim, shape = _blocks_of(call, "codes"), tuple(tables.shape)
    if blocks_per_dim is None or shape[:-1] != (*blocks_per_dim, 2**bits):
        got = f"{shape}, nbits={bits}, block_size={list(call.arguments['block_size'])}"
        return Reason(ReasonCode.SHAPE, f"'codebook' has not one table per block: {got}")
    if shape[-1] != 1:
        return Reason(ReasonCode.SHAPE, f"'codebook' holds vectors of {shape[-1]}, not numbers")
    if sum(count > 1 for count in blocks_per_dim) > 1:
        text = f"tables along several dimensions ({blocks_per_dim}), Core ML takes them along one"
        return Reason(ReasonCode.SHAPE, text)
    return None


def _shift_scale(node: Node) -> None:
    """``scale * (data - zero_point)``, both given per block."""
    arguments, value_range = arguments_of(node), limits(OpCall.of(node))
    data, scale, zero_point = (arguments[name] for name in ("input", "scale", "zero_point"))
    blocks_per_dim = blocks(value_of(data).shape, list(arguments["block_size"]))
    if blocks_per_dim is None or value_range is None:
        raise ConversionError("blocks of weights that do not fit", got=str(node.format_node()))
    become(node, mil_ops.shift_scale(), data, scale, zero_point, list(blocks_per_dim), *value_range)


def _look_up(node: Node) -> None:
    """Look up the stored indices, without the cast by which torchao widens them."""
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
        standalone=False,
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
        # The codebook has two more dimensions than the weight: table entries and vector elements.
        max_rank=MAX_RANK + 2,
        since=Opset.iOS18,
        standalone=False,
        rewrite=_look_up,
    ),
    OpRecord(
        RECORDED_WEIGHT,
        results=FLOAT,
        constraints=(
            *map(IsConstant, ("weight", "lut", "lut_scale", "scale", "zero_point")),
            rank_between("weight", 1, MAX_RANK),
            _record_fits,
        ),
        # A lookup table has two more dimensions than the weight: entries, and their elements.
        max_rank=MAX_RANK + 2,
        since=Opset.iOS16,
        demand=_demand_of_record,
        standalone=False,
    ),
)
