"""Estimated work of MIL ops: floating-point operations, and bytes read and written.

The numbers follow the report's for ATen calls (``ops/flops.py``): a multiply-add counts as two, any
function of one element as one, moving data as zero. They count the arithmetic that an op defines,
not that of an engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from coreml_delegate.runtime.mil.program import (
    Constant,
    Function,
    Op,
    Ref,
    StateType,
    TensorType,
    ValueType,
)

_Shape = tuple[int, ...]


class UnknownSizeError(Exception):
    """A size that is known only at run time."""


class Work:
    """The work of the ops of a function's outermost block.

    Work that depends on sizes known only at run time is unknown, without ``shapes``.

    Args:
        function: The function.
        shapes: Shapes that values had in a run, by name.
    """

    def __init__(self, function: Function, shapes: Mapping[str, _Shape] | None = None) -> None:
        block = function.block
        self._ops = block.ops
        self._types: dict[str, ValueType] = {p.name: p.type for p in function.params}
        self._producer: dict[str, int] = {}
        self._users: dict[str, set[int]] = {}
        for index, op in enumerate(block.ops):
            for out in op.outputs:
                self._types[out.name] = out.type
                self._producer[out.name] = index
            for name in _names(op):
                self._users.setdefault(name, set()).add(index)
        for name, shape in (shapes or {}).items():
            type_ = self._types.get(name)
            if isinstance(type_, TensorType):
                self._types[name] = replace(type_, shape=shape)
        self._constants = {
            op.outputs[0].name: op.attributes["val"]
            for op in block.ops
            if op.type == "const" and "val" in op.attributes
        }
        self._returned = frozenset(block.outputs)

    def flops(self, index: int) -> int | None:
        """Return the floating-point operations of the op at ``index`` in the block.

        Returns:
            None if a size is known only at run time, or the op has nested blocks.
        """
        op = self._ops[index]
        if op.blocks:
            return None
        estimate = _ESTIMATES.get(op.type, _per_result(1))
        try:
            return estimate(Operands(op, self._types, self._constants))
        except UnknownSizeError:
            return None

    def bytes_moved(self, index: int, fused_with: Iterable[int] = ()) -> int | None:
        """Return the bytes that the op at ``index`` reads and writes, in the types of the program.

        Values between the op and the ops ``fused_with`` it are not moved.

        Returns:
            None if a size is known only at run time. Weights count with their stored size.
        """
        together = {index, *fused_with}
        op = self._ops[index]
        read = [name for name in _names(op) if self._producer.get(name) not in together]
        partly_read = {b.name for b in op.inputs.get("x", ()) if isinstance(b, Ref)}
        is_part = op.type in _TAKE_PARTS
        written_names = [
            out.name
            for out in op.outputs
            if out.name in self._returned or self._users.get(out.name, set()) - together
        ]
        try:
            stored = sum(constant.nbytes for constant in op.literals())
            result_bytes = sum(self._size(out.name) for out in op.outputs)
            for name in read:
                size = self._size(name)
                stored += min(size, result_bytes) if is_part and name in partly_read else size
            return stored + sum(map(self._size, written_names))
        except UnknownSizeError:
            return None

    def _size(self, name: str) -> int:
        """Return the bytes of a value; of a weight, the stored bytes."""
        producer = self._producer.get(name)
        if producer is not None and self._ops[producer].type.startswith("const"):
            op = self._ops[producer]
            own = sum(constant.nbytes for constant in (*op.literals(), *op.attributes.values()))
            return own + sum(map(self._size, _names(op)))
        type_ = _tensor(self._types.get(name))
        # A list, for example, which grows at run time.
        if type_ is None:
            raise UnknownSizeError
        return math.ceil(math.prod(_static_shape(type_)) * type_.dtype.bits / 8)


@dataclass(frozen=True, slots=True)
class Operands:
    """An op with the sizes of its operands and results, by the types and constants in scope."""

    op: Op
    types: Mapping[str, ValueType]
    constants: Mapping[str, Constant]

    def shape(self, parameter: str, index: int = 0) -> _Shape:
        """Return the shape of an argument.

        Raises:
            UnknownSizeError: A size is known only at run time, or the argument is missing.
        """
        bindings = self.op.inputs.get(parameter, ())
        if index >= len(bindings):
            raise UnknownSizeError
        binding = bindings[index]
        type_ = binding.type if isinstance(binding, Constant) else self.types.get(binding.name)
        tensor = _tensor(type_)
        if tensor is None:
            raise UnknownSizeError
        return _static_shape(tensor)

    def has(self, parameter: str) -> bool:
        """Whether the op has an argument."""
        return bool(self.op.inputs.get(parameter))

    def result(self) -> _Shape:
        """Return the shape of the first result; an op's other results are by-products."""
        tensor = _tensor(self.types.get(self.op.outputs[0].name)) if self.op.outputs else None
        if tensor is None:
            raise UnknownSizeError
        return _static_shape(tensor)

    def literal(self, parameter: str, default: object = None) -> object:
        """Return the value of a constant argument as plain Python."""
        bindings = self.op.inputs.get(parameter, ())
        binding = bindings[0] if bindings else None
        if isinstance(binding, Ref):
            binding = self.constants.get(binding.name)
        if not isinstance(binding, Constant):
            return default
        data = binding.data
        return data.tolist() if isinstance(data, np.ndarray | np.generic) else data


Estimate = Callable[[Operands], int]


def _per_result(operations: int) -> Estimate:
    return lambda op: operations * math.prod(op.result())


def _per_input(operations: int, parameter: str = "x") -> Estimate:
    return lambda op: operations * math.prod(op.shape(parameter))


def _contraction(elements: int, summed: int, op: Operands) -> int:
    """Return the operations of ``elements`` sums of ``summed`` products, plus a bias each."""
    return elements * (2 * summed + op.has("bias"))


def _conv(op: Operands) -> int:
    return _contraction(math.prod(op.result()), math.prod(op.shape("weight")[1:]), op)


def _conv_transpose(op: Operands) -> int:
    products = 2 * math.prod(op.shape("x")) * math.prod(op.shape("weight")[1:])
    return products + op.has("bias") * math.prod(op.result())


def _matmul(op: Operands) -> int:
    x = op.shape("x")
    transposed = len(x) > 1 and bool(op.literal("transpose_x", default=False))
    return _contraction(math.prod(op.result()), x[-2 if transposed else -1], op)


def _einsum(op: Operands) -> int:
    terms = str(op.literal("equation")).partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        for letter, size in zip(term.strip(), op.shape("values", index), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return len(terms) * math.prod(sizes.values())


def _attention(op: Operands) -> int:
    *batch, length, width = op.shape("query")
    keys, values = op.shape("key")[-2], op.shape("value")[-1]
    scores = math.prod(batch) * length * keys
    return scores * (2 * width + _SOFTMAX + 2 * values)


def _recurrence(op: Operands) -> int:
    """Return the operations of lstm, gru or rnn; ``x``: [steps, batch, width]."""
    steps, batch = op.shape("x")[:2]
    weights = [
        name
        for side in ("", "_back")
        for name in (f"weight_ih{side}", f"weight_hh{side}")
        if op.has(name)
    ]
    return 2 * steps * batch * sum(math.prod(op.shape(name)) for name in weights)


def _pooling(op: Operands) -> int:
    window = op.literal("kernel_sizes")
    if not isinstance(window, list):
        raise UnknownSizeError
    return math.prod(op.result()) * math.prod(map(int, window))


_SOFTMAX: Final = 5
_NORM: Final = 7
_BILINEAR: Final = 8

MOVES: Final = frozenset(
    {
        *("const", "identity", "cast", "shape", "make_list", "list_length", "list_read"),
        *("list_write", "list_gather", "list_scatter", "read_state", "write_state"),
        *("coreml_update_state", "reshape", "reshape_like", "expand_dims", "squeeze", "transpose"),
        *("concat", "stack", "split", "tile", "flatten2d", "depth_to_space", "space_to_depth"),
        *("space_to_batch", "batch_to_space", "pixel_shuffle", "pixel_unshuffle", "pad", "crop"),
        *("slice_by_index", "slice_by_size", "slice_update", "reverse", "reverse_sequence"),
        *("sliding_windows", "band_part", "gather", "gather_along_axis", "gather_nd", "fill"),
        *("fill_like", "range_1d", "one_hot", "non_zero", "resize_nearest_neighbor"),
        *("upsample_nearest_neighbor", "constexpr_cast", "constexpr_affine_dequantize"),
        *("constexpr_blockwise_shift_scale", "constexpr_lut_to_dense", "constexpr_lut_to_sparse"),
        *("constexpr_sparse_blockwise_shift_scale", "constexpr_sparse_to_dense", "classify"),
        *("random_bernoulli", "random_categorical", "random_normal", "random_uniform"),
    }
)
"""Ops that move or create data. Weights are decompressed before a call, not during it."""

_TAKE_PARTS: Final = frozenset(
    {
        *("gather", "gather_along_axis", "gather_nd"),
        *("slice_by_index", "slice_by_size", "crop", "split"),
    }
)
"""Ops that read only the elements of ``x`` that they return."""

_ESTIMATES: Final[Mapping[str, Estimate]] = {
    **dict.fromkeys(MOVES, lambda _: 0),
    "conv": _conv,
    "conv_quantized": _conv,
    "conv_transpose": _conv_transpose,
    "linear": lambda op: _contraction(math.prod(op.result()), op.shape("weight")[-1], op),
    "matmul": _matmul,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn"), _recurrence),
    "softmax": _per_result(_SOFTMAX),
    **dict.fromkeys(("layer_norm", "instance_norm", "l2_norm"), _per_result(_NORM)),
    "local_response_norm": _per_result(_NORM),
    "batch_norm": _per_result(2),
    **dict.fromkeys(("avg_pool", "max_pool", "l2_pool"), _pooling),
    **{
        f"reduce_{name}": _per_input(1)
        for name in ("argmax", "argmin", "l1_norm", "max", "mean", "min", "prod", "sum")
    },
    **{
        f"reduce_{name}": _per_input(2)
        for name in ("l2_norm", "log_sum", "log_sum_exp", "sum_square")
    },
    **dict.fromkeys(("cumsum", "topk", "argsort"), _per_input(1)),
    **dict.fromkeys(("quantize", "dequantize"), _per_input(2, "input")),
    **dict.fromkeys(("scatter", "scatter_along_axis", "scatter_nd"), _per_input(1, "updates")),
    **dict.fromkeys(("resize_bilinear", "upsample_bilinear"), _per_result(_BILINEAR)),
    **dict.fromkeys(("resize", "crop_resize", "resample"), _per_result(_BILINEAR)),
    "non_maximum_suppression": _per_input(1, "boxes"),
}
"""Op type -> estimate. Any other op counts one operation per element of its result."""


def _names(op: Op) -> Iterator[str]:
    """Yield the names of the values that an op and its blocks read from outside, each once."""
    nested_ops = [nested for block in op.blocks for nested in block.walk()]
    inner = {out.name for nested in nested_ops for out in nested.outputs}
    inner |= {param.name for block in op.blocks for param in block.inputs}
    seen: dict[str, None] = {}
    for reader in (op, *nested_ops):
        seen.update(dict.fromkeys(reader.references()))
    return (name for name in seen if name not in inner)


def _tensor(type_: ValueType | None) -> TensorType | None:
    if isinstance(type_, StateType):
        return type_.wrapped
    return type_ if isinstance(type_, TensorType) else None


def _static_shape(type_: TensorType) -> _Shape:
    if type_.shape is None:
        raise UnknownSizeError
    sizes = [size for size in type_.shape if size is not None]
    if len(sizes) < len(type_.shape):
        raise UnknownSizeError
    return tuple(sizes)
