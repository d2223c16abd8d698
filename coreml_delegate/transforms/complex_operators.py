"""Operators on complex numbers, computed by operators on pairs of reals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from coreml_delegate.ops.call import GETITEM, overload_of
from coreml_delegate.ops.edits import arguments_of, value_of
from coreml_delegate.patches.torch import schema_of
from coreml_delegate.transforms import fourier
from coreml_delegate.transforms.complex_pairs import (
    ATEN,
    COMPONENTS,
    FormError,
    Pair,
    PairCall,
    Part,
)

OnPairs: TypeAlias = Callable[[PairCall], "Pair | Part"]
"""Emits the calls on reals that replace a complex call.

Returns a pair, a node for a real result, or None for no result.
"""

# Arguments with values; the other arguments are positions or sizes.
_DATA = frozenset({"self", "input", "tensors", "src", "source", "values", "value", "other"})


def _apply_to_parts(call: PairCall) -> Pair:
    """Apply the op to both parts: it moves values, or is linear with real factors."""
    return call.map_parts(call.node.target, _DATA.__contains__)


def _unchanged(call: PairCall) -> Pair:
    return call.pair("self")


def _copy(call: PairCall) -> Pair:
    """Return the source if shapes are equal: the graph then needs no ``copy``."""
    destination, source = (value_of(call.arguments[name]).shape for name in ("self", "src"))
    has_equal_shape = list(map(str, destination)) == list(map(str, source))
    return call.pair("src") if has_equal_shape else _apply_to_parts(call)


def _item(call: PairCall) -> Pair:
    source, index = call.node.args
    parts = call.pair(source).parts
    return Pair(
        *(call.emit(call.node.target, p, index) if isinstance(p, Node) else p for p in parts)
    )


# Between complex and real


def _view_as_complex(call: PairCall) -> Pair:
    x: Node = call.arguments["self"]
    last = value_of(x).dim() - 1
    if x.target is ATEN.stack.default:
        stacked = arguments_of(x)
        if stacked["dim"] in (-1, last):
            return Pair(*stacked["tensors"])
    return Pair(*(call.emit(ATEN.select.int, x, last, part) for part in (0, 1)))


def _view_as_real(call: PairCall) -> Node:
    parts = call.as_nodes(call.pair("self"))
    result = call.emit(ATEN.stack.default, list(parts), -1)
    # A select of one part is that part.
    for user in list(call.node.users):
        if user.target is ATEN.select.int:
            _, dim, index = user.args
            if dim in (-1, value_of(call.node).dim() - 1):
                user.replace_all_uses_with(parts[int(str(index))])
    return result


def _reinterpret(call: PairCall) -> Pair | Node:
    """View as another dtype: the bits of a complex tensor are its interleaved parts."""
    x, dtype = call.arguments["self"], call.arguments["dtype"]
    if value_of(x).dtype is dtype:
        return call.pair(x)
    last = value_of(x).dim() - 1
    if COMPONENTS.get(dtype) is value_of(x).dtype:
        slices = ((x, last, part, _END, 2) for part in (0, 1))
        return Pair(*(call.emit(ATEN.slice.Tensor, *arguments) for arguments in slices))
    if COMPONENTS.get(value_of(x).dtype) is not dtype:
        raise FormError(f"a view of {value_of(x).dtype} as {dtype}")
    stacked = call.emit(ATEN.stack.default, list(call.as_nodes(call.pair(x))), -1)
    return call.emit(ATEN.flatten.using_ints, stacked, last, -1)


def _cast(call: PairCall) -> Pair | Node:
    """Cast; a cast to a real dtype drops the imaginary part, as in PyTorch."""
    dtype = call.arguments.get("dtype") or value_of(call.node).dtype
    pair = call.pair("self")
    if not dtype.is_complex:
        if dtype is torch.bool:
            raise FormError("a cast of a complex tensor to bool")
        return call.emit(ATEN._to_copy.default, call.as_nodes(pair)[0], dtype=dtype)
    component = COMPONENTS[dtype]
    return Pair(
        *(
            call.emit(ATEN._to_copy.default, part, dtype=component)
            if isinstance(part, Node) and value_of(part).dtype is not component
            else part
            for part in pair.parts
        )
    )


def _fill(call: PairCall) -> Pair | Node:
    """Fill with a number; a tensor argument only provides shape and dtype."""
    result = value_of(call.node).dtype
    dtype = COMPONENTS.get(result, result)
    number = call.arguments.get("fill_value", call.arguments.get("s"))
    names = [a.name for a in schema_of(overload_of(call.node.target)).arguments]

    def fill(part: Any) -> Node:
        def replace(name: str, value: Any) -> Any:
            if name in ("fill_value", "s"):
                return part
            return call.pair(value).node if isinstance(value, Node) and name == "self" else value

        args = [replace(n, v) for n, v in zip(names, call.node.args, strict=False)]
        kwargs = {n: replace(n, v) for n, v in call.node.kwargs.items()}
        return call.emit(call.node.target, *args, **{**kwargs, "dtype": dtype})

    if not isinstance(number, complex) or not number:
        real = fill(number and number.real)
        return Pair(real) if result.is_complex else real
    return Pair(*(fill(part) if part else None for part in (number.real, number.imag)))


def _frequencies(call: PairCall) -> Node:
    """Return the frequencies of a transform as a constant; their number is static."""
    value = call.constant_value(call.node)
    if value is None:
        raise FormError("a dynamic number of frequencies")
    return call.constant((call.node.name,), lambda: value)


def _size(call: PairCall) -> Node:
    node = call.pair("self").node
    return call.emit(call.node.target, node, *call.node.args[1:])


def _drop(_: PairCall) -> None:
    """Drop an assertion on the metadata of a complex tensor."""


# Arithmetic


def _scale_by_alpha(call: PairCall, name: str) -> Pair:
    """Return the argument ``name``, times ``alpha``."""
    return call.multiply(call.pair(name), Pair.of_number(call.arguments.get("alpha", 1)))


def _divide(call: PairCall) -> Pair:
    if call.arguments.get("rounding_mode") is not None:
        raise FormError("a rounded quotient")
    return call.divide(call.pair("self"), call.pair("other"))


def _magnitude(call: PairCall) -> Node:
    """``|x|``; ``|x| ** 2``, as in a spectrogram, becomes ``real ** 2 + imag ** 2``."""
    pair = call.pair("self")
    for user in list(call.node.users):
        is_power = user.target is ATEN.pow.Tensor_Scalar and user.args[1] == 2
        if is_power or user.target is ATEN.square.default:
            user.replace_all_uses_with(call.norm(pair))  # pyright: ignore[reportArgumentType]
    return call.magnitude(pair)


def _sign(call: PairCall) -> Pair:
    pair = call.pair("self")
    magnitude = call.nonzero(call.magnitude(pair))
    return Pair(*(call.quotient(part, magnitude) for part in pair.parts))


def _logarithm(call: PairCall) -> Pair:
    pair = call.pair("self")
    return Pair(call.emit(ATEN.log.default, call.magnitude(pair)), call.angle(pair))


def _power(call: PairCall) -> Pair:
    exponent = call.arguments["exponent"]
    if isinstance(exponent, complex):
        raise FormError("a complex exponent")
    return call.power(call.pair("self"), exponent)


def _addition_theorem(real: tuple[Any, Any], imag: tuple[Any, Any], sign: int = 1) -> OnPairs:
    """Return a sine or cosine: both parts are ``f(real) * g(imag)``, by the addition theorem.

    Args:
        real: The two functions whose product is the real part.
        imag: The two functions whose product is the imaginary part.
        sign: Sign of the imaginary part.
    """

    def apply(call: PairCall) -> Pair:
        parts = call.as_nodes(call.pair("self"))
        products = (
            call.product(*(call.emit(f, part) for f, part in zip(functions, parts, strict=True)))
            for functions in (real, imag)
        )
        cosine, sine = products
        return Pair(cosine, sine if sign > 0 else call.negate(sine))

    return apply


def _equal(call: PairCall) -> Node:
    a, b = call.pair("self"), call.pair("other")
    others = b.parts if not isinstance(b.real, Node) and not isinstance(b.imag, Node) else None
    if others is not None:
        pairs = zip(call.as_nodes(a), others, strict=True)
        equal = [call.emit(ATEN.eq.Scalar, part, other or 0.0) for part, other in pairs]
    else:
        pairs = zip(call.as_nodes(a), call.as_nodes(b), strict=True)
        equal = [call.emit(ATEN.eq.Tensor, part, other) for part, other in pairs]
    return call.emit(ATEN.logical_and.default, *equal)


# Products of matrices


def _product(*names: str) -> OnPairs:
    """Return a product that is linear in both named operands."""

    def apply(call: PairCall) -> Pair:
        a, b = (call.pair(name) for name in names)
        return call.bilinear(lambda x, y: call.emit(call.node.target, x, y), a, b)

    return apply


def _linear(call: PairCall) -> Pair:
    def product(x: Part, y: Part) -> Node:
        return call.emit(ATEN.linear.default, x, y)

    result = call.bilinear(product, call.pair("input"), call.pair("weight"))
    if call.arguments.get("bias") is None:
        return result
    return call.combine(call.sum, result, call.pair("bias"))


def _matmul_add(target: Any, *names: str) -> OnPairs:
    """Return ``beta * self + alpha * (a @ b)``."""

    def apply(call: PairCall) -> Pair:
        a, b = (call.pair(name) for name in names)
        product = call.bilinear(lambda x, y: call.emit(target, x, y), a, b)
        terms = zip((call.pair("self"), product), ("beta", "alpha"), strict=True)
        scaled = (call.multiply(t, Pair.of_number(call.arguments[n])) for t, n in terms)
        return call.combine(call.sum, *scaled)

    return apply


def _einsum(call: PairCall) -> Pair:
    equation, operands = call.arguments["equation"], call.arguments["tensors"]
    if len(operands) == 1:
        parts = call.pair(operands[0]).parts
        return Pair(*(p and call.emit(ATEN.einsum.default, equation, [p]) for p in parts))
    if len(operands) > 2:
        raise FormError("einsum of more than two operands")
    a, b = map(call.pair, operands)
    return call.bilinear(lambda x, y: call.emit(ATEN.einsum.default, equation, [x, y]), a, b)


def _vector_norm(call: PairCall) -> Node:
    magnitude = call.magnitude(call.pair("self"))
    keywords = {k: v for k, v in call.node.kwargs.items() if k != "dtype"}
    return call.emit(call.node.target, magnitude, *call.node.args[1:], **keywords)


_END = (1 << 63) - 1
_COS_SINH = (ATEN.cos.default, ATEN.sinh.default)
_SIN_SINH = (ATEN.sin.default, ATEN.sinh.default)
_COSH_SIN = (ATEN.cosh.default, ATEN.sin.default)
_SINH_SIN = (ATEN.sinh.default, ATEN.sin.default)

_APPLIED_TO_PARTS = """
alias.default broadcast_to.default cat.default chunk.default
constant_pad_nd.default cumsum.default diagonal.default expand.default
expand_as.default fft_fftshift.default fft_ifftshift.default fill.Scalar flatten.using_ints
flip.default gather.default index.Tensor index_add.default index_copy.default index_put.default
index_select.default masked_fill.Scalar masked_fill.Tensor mean.default mean.dim movedim.int
movedim.intlist narrow.default pad.default permute.default repeat.default
repeat_interleave.self_int reshape.default roll.default scatter.src scatter.value
scatter_add.default select.int select_scatter.default slice.Tensor slice_scatter.default
split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims stack.default
sum.default sum.dim_IntList t.default tile.default transpose.int tril.default triu.default
unbind.int unflatten.int unfold.default unsqueeze.default view.default where.ScalarOther
where.ScalarSelf where.self
"""

_UNCHANGED = """
clone.default contiguous.default detach.default lift_fresh_copy.default positive.default
resolve_conj.default resolve_neg.default
"""

_FILLS = """
empty.memory_format empty_like.default full.default full_like.default new_empty.default
new_full.default new_ones.default new_zeros.default ones.default ones_like.default
scalar_tensor.default zeros.default zeros_like.default
"""

_ROWS: tuple[tuple[str, OnPairs], ...] = (
    (_APPLIED_TO_PARTS, _apply_to_parts),
    (_UNCHANGED, _unchanged),
    ("copy.default", _copy),
    (_FILLS, _fill),
    ("complex.default", lambda c: Pair(c.arguments["real"], c.arguments["imag"])),
    ("polar.default", lambda c: c.polar(c.arguments["abs"], c.arguments["angle"])),
    ("view_as_complex.default", _view_as_complex),
    ("view_as_real.default", _view_as_real),
    ("view.dtype", _reinterpret),
    ("real.default", lambda c: c.as_nodes(c.pair("self"))[0]),
    ("imag.default", lambda c: c.as_nodes(c.pair("self"))[1]),
    ("_to_copy.default to.dtype", _cast),
    ("_assert_tensor_metadata.default", _drop),
    ("sym_size.int sym_numel.default", _size),
    ("neg.default _neg_view.default", lambda c: c.negative(c.pair("self"))),
    (
        "_conj.default _conj_physical.default conj_physical.default",
        lambda c: c.conjugate(c.pair("self")),
    ),
    (
        "add.Tensor add.Scalar",
        lambda c: c.combine(c.sum, c.pair("self"), _scale_by_alpha(c, "other")),
    ),
    (
        "sub.Tensor sub.Scalar",
        lambda c: c.combine(c.difference, c.pair("self"), _scale_by_alpha(c, "other")),
    ),
    (
        "rsub.Tensor rsub.Scalar",
        lambda c: c.combine(c.difference, c.pair("other"), _scale_by_alpha(c, "self")),
    ),
    ("mul.Tensor mul.Scalar", lambda c: c.multiply(c.pair("self"), c.pair("other"))),
    ("div.Tensor div.Scalar div.Tensor_mode", _divide),
    ("reciprocal.default", lambda c: c.divide(Pair(1.0), c.pair("self"))),
    ("square.default", lambda c: c.multiply(c.pair("self"), c.pair("self"))),
    ("pow.Tensor_Scalar", _power),
    ("sqrt.default", lambda c: c.power(c.pair("self"), 0.5)),
    ("abs.default", _magnitude),
    ("angle.default", lambda c: c.angle(c.pair("self"))),
    ("sgn.default", _sign),
    ("exp.default", lambda c: c.exponential(c.pair("self"))),
    ("log.default", _logarithm),
    ("sin.default", _addition_theorem((ATEN.sin.default, ATEN.cosh.default), _COS_SINH)),
    ("cos.default", _addition_theorem((ATEN.cos.default, ATEN.cosh.default), _SIN_SINH, sign=-1)),
    ("sinh.default", _addition_theorem((ATEN.sinh.default, ATEN.cos.default), _COSH_SIN)),
    ("cosh.default", _addition_theorem((ATEN.cosh.default, ATEN.cos.default), _SINH_SIN)),
    ("eq.Tensor eq.Scalar", _equal),
    ("ne.Tensor ne.Scalar", lambda c: c.emit(ATEN.logical_not.default, _equal(c))),
    ("linalg_vector_norm.default", _vector_norm),
    ("mm.default", _product("self", "mat2")),
    ("bmm.default", _product("self", "mat2")),
    ("matmul.default", _product("self", "other")),
    ("mv.default", _product("self", "vec")),
    ("dot.default", _product("self", "tensor")),
    ("linear.default", _linear),
    ("addmm.default", _matmul_add(ATEN.mm.default, "mat1", "mat2")),
    ("baddbmm.default", _matmul_add(ATEN.bmm.default, "batch1", "batch2")),
    ("einsum.default", _einsum),
    ("_fft_r2c.default", fourier.real_to_complex),
    ("_fft_c2c.default", fourier.complex_to_complex),
    ("_fft_c2r.default", fourier.complex_to_real),
    ("fft_fftfreq.default fft_rfftfreq.default", _frequencies),
    ("stft.default", fourier.short_time),
    ("istft.default", fourier.inverse_short_time),
)

OPERATORS: Mapping[str, OnPairs] = MappingProxyType(
    {f"aten.{op}": function for ops, function in _ROWS for op in ops.split()} | {GETITEM: _item}
)
"""The rewrite of each operator on complex numbers, by target name."""
