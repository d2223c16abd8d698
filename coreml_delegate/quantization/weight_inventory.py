"""The weights of a MIL program: storage scheme, stored size, and uncompressed size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.runtime.mil.program import Block, Constant, Function, Op, Program, TensorType

_CONST = "const"
_DECOMPRESSIONS = "constexpr_"
DENSE = "dense"
# By op: its word in the scheme, and its input with one element per weight. ``constexpr_cast`` has
# no word: it widens the result of another op, or a dense weight.
_SCHEMES: Mapping[str, tuple[str, str]] = {
    "constexpr_affine_dequantize": ("affine", "quantized_data"),
    "constexpr_blockwise_shift_scale": ("blockwise", "data"),
    "constexpr_cast": ("", "source_val"),
    "constexpr_lut_to_dense": ("lut", "indices"),
    "constexpr_lut_to_sparse": ("lut", "indices_nonzero_data"),
    "constexpr_sparse_blockwise_shift_scale": ("blockwise", "nonzero_data"),
    "constexpr_sparse_to_dense": ("sparse", "nonzero_data"),
}
_TABLE = "lut"
_NO_DATA = frozenset({"name", "axis", "shape", "output_dtype"})


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight tensor in storage.

    Attributes:
        shape: Shape of the decompressed tensor.
        dtype: Element type of the decompressed tensor.
        scheme: ``dense``, or words such as ``affine``, ``blockwise``, ``lut`` and ``sparse``.
        stored_as: Element type in storage; an index of ``lut`` is unsigned.
        constants: The stored data, scales, tables and masks.
        uncompressed_bytes: Size of the decompressed tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    stored_as: str
    constants: tuple[Constant, ...]
    uncompressed_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Size in the file, scales, tables and masks included."""
        return sum(constant.nbytes for constant in self.constants)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element, scales, tables and masks included."""
        return 8 * self.stored_bytes / max(math.prod(self.shape), 1)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, sizes in bytes."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "scheme": self.scheme,
            "stored_as": self.stored_as,
            "bits_per_weight": round(self.bits_per_weight, 3),
            "stored_bytes": self.stored_bytes,
            "uncompressed_bytes": self.uncompressed_bytes,
        }


def weights_of(program: Program) -> list[StoredWeight]:
    """Return the weights of a program in the order of its ops; shared weights are listed once."""
    weights: dict[tuple[int, ...], StoredWeight] = {}
    for function in program.functions.values():
        for weight in _function_weights(function):
            key = tuple(_address(constant) for constant in weight.constants)
            weights.setdefault(key, weight)
    return list(weights.values())


def summarize_weights(program: Program) -> dict[str, Any]:
    """Return counts and sizes in bytes, by stored element type and by weight."""
    weights = weights_of(program)
    by_dtype: dict[str, dict[str, int]] = {}
    for constant in (c for weight in weights for c in weight.constants):
        entry = by_dtype.setdefault(_label(constant), {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += constant.nbytes
    return {
        "count": sum(entry["count"] for entry in by_dtype.values()),
        "bytes": sum(weight.stored_bytes for weight in weights),
        "uncompressed_bytes": sum(weight.uncompressed_bytes for weight in weights),
        "by_dtype": dict(sorted(by_dtype.items())),
        "tensors": [weight.as_dict() for weight in weights],
    }


def _function_weights(function: Function) -> Iterator[StoredWeight]:
    stored = [op for op in function.block.walk() if _is_stored(op)]
    producers = {output.name: op for op in stored for output in op.outputs}
    inner = set(_intermediate_values(stored))
    for op in stored:
        if inner.isdisjoint(output.name for output in op.outputs):
            yield from _weight(op, producers)
    yield from _immediate_weights(function.block)


def _is_stored(op: Op) -> bool:
    return op.type == _CONST or op.type.startswith(_DECOMPRESSIONS)


def _intermediate_values(ops: Iterable[Op]) -> Iterator[str]:
    """Yield the names of the values that a decompression op reads."""
    for op in ops:
        if op.type.startswith(_DECOMPRESSIONS):
            for bindings in op.inputs.values():
                yield from (b.name for b in bindings if not isinstance(b, Constant))


def _weight(op: Op, producers: Mapping[str, Op]) -> Iterator[StoredWeight]:
    kind = op.outputs[-1].type
    constants = [c for _, c in _stored_constants(op, producers) if isinstance(c.data, np.ndarray)]
    in_file = any(c.offset is not None for c in constants)
    if not in_file or not isinstance(kind, TensorType) or kind.shape is None:
        return
    shape = tuple(size or 0 for size in kind.shape)
    words = [_SCHEMES.get(o.type, (o.type, ""))[0] for o in _decompression_chain(op, producers)]
    yield StoredWeight(
        name=op.outputs[-1].name,
        shape=shape,
        dtype=kind.dtype.label,
        scheme=" ".join(dict.fromkeys(filter(None, words))) or DENSE,
        stored_as=_stored_as(op, producers),
        constants=tuple(constants),
        uncompressed_bytes=-(-math.prod(shape) * kind.dtype.bits // 8),
    )


def _immediate_weights(block: Block) -> Iterator[StoredWeight]:
    """Yield the weights that ops take directly, without a const op."""
    for op in block.walk():
        if _is_stored(op):
            continue
        for constant in _constants(op):
            kind = constant.type
            if constant.offset is None or not isinstance(kind, TensorType):
                continue
            shape = tuple(size or 0 for size in kind.shape or ())
            yield StoredWeight(
                op.name,
                shape,
                kind.dtype.label,
                DENSE,
                kind.dtype.label,
                (constant,),
                constant.nbytes,
            )


def _decompression_chain(op: Op, producers: Mapping[str, Op]) -> Iterator[Op]:
    """Yield a decompression op and the decompression ops before it."""
    if op.type != _CONST:
        yield op
        for bindings in op.inputs.values():
            for binding in bindings:
                if not isinstance(binding, Constant) and binding.name in producers:
                    yield from _decompression_chain(producers[binding.name], producers)


def _stored_constants(op: Op, producers: Mapping[str, Op]) -> Iterator[tuple[str, Constant]]:
    """Yield the stored constants of a value with their parameters, without duplicates."""
    seen: set[int] = set()
    for part in [op] if op.type == _CONST else list(_decompression_chain(op, producers)):
        for parameter, constant in _parameters(part, producers):
            if _address(constant) not in seen:
                seen.add(_address(constant))
                yield parameter, constant


def _parameters(op: Op, producers: Mapping[str, Op]) -> Iterator[tuple[str, Constant]]:
    yield from ((name, value) for name, value in op.attributes.items() if name not in _NO_DATA)
    for parameter, bindings in op.inputs.items():
        for binding in bindings:
            source = None if isinstance(binding, Constant) else producers.get(binding.name)
            if isinstance(binding, Constant):
                yield parameter, binding
            elif source is not None and source.type == _CONST:
                yield parameter, source.attributes["val"]


def _constants(op: Op) -> Iterator[Constant]:
    yield from op.attributes.values()
    for bindings in op.inputs.values():
        yield from (binding for binding in bindings if isinstance(binding, Constant))


def _stored_as(op: Op, producers: Mapping[str, Op]) -> str:
    """Return the stored element type of the weights."""
    for part in [op] if op.type == _CONST else list(_decompression_chain(op, producers)):
        parameters = dict(_parameters(part, producers))
        is_dense = part is op and op.type == _CONST
        element = parameters.get("val" if is_dense else _SCHEMES.get(part.type, ("", ""))[1])
        if element is None:
            continue
        table = parameters.get(_TABLE)
        if table is not None and isinstance(table.data, np.ndarray) and table.data.ndim == 1:
            # Before iOS18, indices of every width are packed into bytes.
            return f"uint{max(math.ceil(math.log2(table.data.size)), 1)}"
        return _label(element)
    return _label(next(c for _, c in _stored_constants(op, producers)))


def _label(constant: Constant) -> str:
    kind = constant.type
    return kind.dtype.label if isinstance(kind, TensorType) else type(kind).__name__


def _address(constant: Constant) -> int:
    """Return the address of the data, which is equal for weights that functions share."""
    data = constant.stored
    return data.ctypes.data if isinstance(data, np.ndarray) else id(constant)
