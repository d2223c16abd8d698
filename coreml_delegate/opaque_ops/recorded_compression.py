"""Weights whose compression ``coremltools.optimize.torch`` recorded: protect, translate, restore.

Its compressors leave floats in a weight, and buffers beside it that say how the floats came about.
The names of the buffers are ``_COREML_/WEIGHT/KEY``, with the keys

- ``compression_type``: int64 [stages], see ``Stage``;
- ``lut``: floats [*groups, entries, length], the lookup tables of a palettized weight; vectors of
  several elements lie along ``vector_axis``; ``palettization_scale``: a factor of the values
  that were looked up, per block of the weight;
- ``quantization_scale``, ``zero_point``, ``quantization_n_bits``: of integers, which are the weight
  or, if it is palettized too, the entries of its tables.

``coremltools.convert`` finds them in the state of the program. A partition does not have them, so
each use of such a weight becomes a call of an op that takes the weight and its record, and returns
the weight. The translation of the call computes the indices or integers again, which reproduce the
weight, and emits the ops that ``coremltools.convert`` would emit. A weight that differs from its
record, or that the deployment target cannot store in this form, stays in floats, with a warning.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, Node

from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.compressed import emit_look_up, is_blockwise, pad_tables
from coreml_delegate.opaque_ops.compressed_weights import (
    BYTES,
    INTEGERS,
    emit_shift_scale,
    narrow,
)
from coreml_delegate.ops import RECORDS, Reason, ReasonCode
from coreml_delegate.ops.call import RECORDED_WEIGHT, OpCall, target_name
from coreml_delegate.ops.compressed import scale_blocks
from coreml_delegate.ops.constants import stored_constants
from coreml_delegate.ops.edits import insert, remove_unused
from coreml_delegate.ops.mil_ops import recorded_weight, value_in
from coreml_delegate.patches.torch import FakeTensor, OpOverload
from coreml_delegate.targets import Opset

_logger = logging.getLogger(__name__)
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")
_LIBRARY.define(
    "recorded_weight(Tensor weight, bool is_sparse, Tensor? lut, Tensor? lut_scale,"
    " int vector_axis, Tensor? scale, Tensor? zero_point, int bits) -> Tensor"
)
_LIBRARY.impl("recorded_weight", lambda weight, *_: weight.clone(), "CompositeExplicitAutograd")

_Array = NDArray[Any]
_PREFIX = "_COREML_/"
_CONSTANT = "coreml_delegate_record/"
_MAX_BITS = 8
_ROUNDINGS = 4
"""Steps of the model's float type that a weight may differ from its record: weight, scale and their
ratio are rounded, and in bfloat16 an integer of 8 bits may be read one off."""

_ZERO = 1e-3
"""Weights below this part of the largest may differ as much as it."""

_CHUNK = 2**12
"""Number of vectors that are compared with a lookup table at once."""


class Stage(enum.IntEnum):
    """A stage of compression, by its number in ``compression_type``."""

    PRUNING = 1
    PALETTIZATION = 2
    QUANTIZATION = 3


_REQUIRED: Mapping[Stage, tuple[str, ...]] = {
    Stage.PRUNING: (),
    Stage.PALETTIZATION: ("lut",),
    Stage.QUANTIZATION: ("quantization_scale", "quantization_n_bits"),
}
"""The buffers that a stage needs."""


@dataclass(frozen=True, slots=True)
class _Record:
    """How a weight was compressed.

    Attributes:
        is_sparse: Whether Core ML stores no zeros.
        lut: The lookup tables, or None.
        lut_scale: The factor of looked-up values, or None.
        vector_axis: Dimension of the weight along which vectors lie.
        scale: The scale of integers, or None.
        zero_point: The zero point of integers, or None for 0.
        bits: The width of integers, 0 if there are none.
    """

    is_sparse: bool
    lut: Any
    lut_scale: Any
    vector_axis: int
    scale: Any
    zero_point: Any
    bits: int

    @classmethod
    def read(cls, buffers: Mapping[str, str], state: Mapping[str, torch.Tensor]) -> _Record:
        """Return the record with names of buffers for its tensors.

        Args:
            buffers: Names in ``state`` by key.
            state: Of the program.

        Raises:
            ValueError: The record is not complete, or of a kind that does not exist.
        """

        def numbers(key: str) -> list[int]:
            return [int(n) for n in state[buffers[key]].reshape(-1)] if key in buffers else []

        stages = set(map(Stage, numbers("compression_type")))
        required = ["compression_type", *(key for stage in stages for key in _REQUIRED[stage])]
        if missing := [key for key in required if key not in buffers]:
            raise ValueError(f"its record lacks {', '.join(missing)}")
        is_palettized, is_quantized = Stage.PALETTIZATION in stages, Stage.QUANTIZATION in stages
        bits = sum(numbers("quantization_n_bits")) if is_quantized else 0
        if bits > _MAX_BITS:
            raise ValueError(f"it has integers of {bits} bits, Core ML has at most {_MAX_BITS}")
        return cls(
            is_sparse=Stage.PRUNING in stages,
            lut=buffers["lut"] if is_palettized else None,
            lut_scale=buffers.get("palettization_scale") if is_palettized else None,
            vector_axis=sum(numbers("vector_axis")),
            scale=buffers["quantization_scale"] if is_quantized else None,
            zero_point=buffers.get("zero_point") if is_quantized else None,
            bits=bits,
        )

    def arguments(self, value_of: Callable[[str], Any]) -> tuple[Any, ...]:
        """Return the arguments of the op behind the weight, with a value for each buffer."""
        lut, lut_scale, scale, zero_point = (
            None if name is None else value_of(name)
            for name in (self.lut, self.lut_scale, self.scale, self.zero_point)
        )
        return self.is_sparse, lut, lut_scale, self.vector_axis, scale, zero_point, self.bits


# Protecting and restoring


def protect_recorded_weights(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program`` with a call of ``recorded_weight`` for each use of a recorded weight.

    The weights that Core ML does not store as recorded are logged as warnings.

    Args:
        program: In ATen dialect, in fp32, with its real state; it is not changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.
    """
    state = program.state_dict
    records = _buffers_by_weight(state)
    if not records:
        return program
    for name in sorted(records.keys() - state.keys()):
        _warn(name, "the program stores a value that is computed from it")
    copied = program.run_decompositions({})
    nodes = {key: node for node, key, _ in stored_constants(copied)}
    nodes_of_records = {node: key for key, node in nodes.items() if is_record(key)}
    _rename_buffers(copied, nodes_of_records)
    constants = frozenset(nodes.values()) if constants_inside else frozenset[Node]()
    for name, node in nodes.items():
        users = [user for user in node.users if user.op == "call_function" and not veto(user)]
        buffers = _buffers_of(name, records, state) if users and name in state else None
        if buffers is None:
            continue
        calls: dict[Node, Node] = {}
        try:
            record = _Record.read(buffers, state)
            arguments = record.arguments(nodes.__getitem__)
            calls = {user: insert(user, recorded_weight(), node, *arguments) for user in users}
            _check(calls, target, constants)
            _check_values(state[name], record.arguments(state.__getitem__))
        except ValueError as error:
            _warn(name, str(error))
            for call in calls.values():
                copied.graph.erase_node(call)
        else:
            for user, call in calls.items():
                user.replace_input_with(node, call)
    remove_unused(copied, nodes_of_records)
    copied.graph_module.recompile()
    return copied


def is_record(name: str) -> bool:
    """Return whether a buffer of this name belongs to the record of a weight."""
    return _PREFIX in name


def _rename_buffers(program: ExportedProgram, buffers: Mapping[Node, str]) -> None:
    """Turn the buffers of records into fp32 constants with other names.

    ``coremltools.convert`` would take those that a partition has for whole records.
    """
    names = {node.name: node for node in buffers}
    state: dict[str, Any] = program.state_dict
    specs = program.graph_signature.input_specs
    for index, spec in enumerate(specs):
        node = names.get(spec.arg.name)
        if node is not None:
            name = buffers[node].replace(_PREFIX, _CONSTANT)
            node.meta["val"] = node.meta["val"].to(torch.float32)
            program.constants[name] = state.pop(buffers[node]).to(torch.float32)
            specs[index] = InputSpec(InputKind.CONSTANT_TENSOR, spec.arg, name)


def _buffers_by_weight(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the names of the buffers of each recorded weight, by key."""
    records: dict[str, dict[str, str]] = {}
    for name in names:
        module, prefix, suffix = name.rpartition(_PREFIX)
        weight, _, key = suffix.rpartition("/")
        if prefix and weight:
            records.setdefault(f"{module}{weight}", {})[key] = name
    return records


def _buffers_of(
    name: str, records: Mapping[str, Mapping[str, str]], state: Mapping[str, torch.Tensor]
) -> Mapping[str, str] | None:
    """Return the buffers of a weight, which may have been recorded by another of its names."""
    aliases = (other for other in records if state.get(other) is state[name])
    return records.get(name) or next((records[other] for other in aliases), None)


def warn_of_records(program: ExportedProgram) -> None:
    """Log the recorded weights of a program that was decomposed before it could be protected."""
    for name in _buffers_by_weight(program.state_dict):
        _warn(name, "the program was decomposed before. Lower with to_edge_transform_and_lower")


def _warn(name: str, reason: str) -> None:
    _logger.warning("%s is not stored with its recorded compression: %s", name, reason)


def _check(calls: Mapping[Node, Node], target: Opset | None, constants: Collection[Node]) -> None:
    """Check that Core ML takes the calls that replace a weight.

    Args:
        calls: By the call that reads the weight.
        target: Opset of the deployment target, or None.
        constants: The placeholders that are constants.

    Raises:
        ValueError: It does not take them all.
    """
    record = RECORDS[RECORDED_WEIGHT]
    for user, node in calls.items():
        if not isinstance(user.target, OpOverload):
            text = f"{user.name}, which reads it, stays out of Core ML"
            raise ValueError(text)  # noqa: TRY004 - a reason, no error of the caller
        call = OpCall.of(node, constants)
        reason = record.obstacle(call)
        if reason is not None:
            raise ValueError(reason.text)
        opset, feature = record.demand(call) or (record.since, "compressed weights")
        if target is not None and opset > target:
            raise ValueError(
                f"Core ML has {feature} from {opset.name} on, the deployment target is"
                f" {target.name}. Raise minimum_deployment_target to {opset.name}"
            )


def _check_values(weight: torch.Tensor, record: Sequence[Any]) -> None:
    """Check that a weight has the values of its record, which fits its shape.

    Raises:
        ValueError: It has not.
    """
    values = (weight, *record)
    if any(isinstance(value, FakeTensor) for value in values):
        return
    arrays: list[Any] = [v.detach().numpy() if isinstance(v, torch.Tensor) else v for v in values]
    floats, *arguments = arrays
    if not np.any(floats):
        raise ValueError("all of its values are 0")
    differences = np.abs(_StoredWeight.of(floats, *arguments).values() - floats)
    largest = np.abs(floats).max()
    if (differences > _rounding_step(weight) * (np.abs(floats) + _ZERO * largest)).any():
        worst = float(differences.max() / largest)
        raise ValueError(f"its values have changed since, by up to {worst:.1g} of the largest")


def _rounding_step(weight: torch.Tensor) -> float:
    """Return the relative step of the narrowest type that has all values of an fp32 weight."""
    dtypes = (torch.bfloat16, torch.float16)
    fits = (dtype for dtype in dtypes if torch.equal(weight.to(dtype).to(weight.dtype), weight))
    return _ROUNDINGS * torch.finfo(next(fits, weight.dtype)).eps


def restore_recorded_weights(graph: Graph) -> None:
    """Replace the calls of ``recorded_weight`` in a graph by the weights."""
    for node in list(graph.nodes):
        if target_name(node.target) == RECORDED_WEIGHT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def unite_recorded_weights(graph: Graph) -> None:
    """Replace equal calls of ``recorded_weight`` by the first.

    coremltools fails at equal decompressing ops of several results.
    """
    calls: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if target_name(node.target) == RECORDED_WEIGHT:
            first = calls.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def unread_weights(graph: Graph, refused: Collection[Node]) -> dict[Node, Reason]:
    """Return the calls of ``recorded_weight`` that only refused calls read, with the reason."""
    reason = Reason(ReasonCode.USE, "the call that reads the weight stays on the CPU")
    calls = (node for node in graph.nodes if target_name(node.target) == RECORDED_WEIGHT)
    return {call: reason for call in calls if all(user in refused for user in call.users)}


# Storing


@dataclass(frozen=True, slots=True)
class _StoredWeight:
    """A weight as Core ML stores it: ``scale * (x - offset)``, and 0 where ``mask`` is false.

    Attributes:
        x: Floats or integers [*shape], or indices into tables.
        mask: Whether an element is not 0, bool [*shape]; None for a weight that is not sparse.
        tables: [*groups, entries, length], or None if ``x`` are no indices.
        vector_axis: Dimension along which vectors of tables lie.
        scale: Per block, float32 of the rank of the weight; None for 1.
        offset: Of the shape of ``scale``; None for 0.
        integers: Smallest and largest value of the integers, which are ``x`` or in the tables; None
            if there are none.
    """

    x: _Array
    mask: _Array | None
    tables: _Array | None
    vector_axis: int
    scale: Any
    offset: _Array | None
    integers: tuple[int, int] | None

    @classmethod
    def of(
        cls,
        weight: _Array,
        is_sparse: bool,
        lut: _Array | None,
        lut_scale: _Array | None,
        vector_axis: int,
        scale: _Array | None,
        zero_point: _Array | None,
        bits: int,
    ) -> _StoredWeight:
        """Return the stored form of a weight; for the other arguments see ``_Record``."""
        factor, steps, offset = (_by_block(p, weight.shape) for p in (lut_scale, scale, zero_point))
        x, tables, integers = weight, lut, None
        if lut is not None:
            x = _nearest(weight if factor is None else _divide(weight, factor), lut, vector_axis)
        if steps is not None:
            data, integers = _quantize(weight if lut is None else lut, steps, offset, bits)
            x, tables = (data, None) if lut is None else (x, data)
        if factor is not None and steps is not None:
            blocks = tuple(map(max, factor.shape, steps.shape))
            factor = _spread(factor, blocks) * _spread(steps, blocks)
            offset = None if offset is None else np.broadcast_to(_spread(offset, blocks), blocks)
        mask = weight != 0 if is_sparse else None
        product = steps if factor is None else factor
        return cls(x, mask, tables, vector_axis, product, offset, integers)

    def values(self) -> _Array:
        """Return the weight that Core ML computes, in float32."""
        x = self.x if self.tables is None else _look_up(self.x, self.tables, self.vector_axis)
        if self.offset is not None:
            x = x - _spread(self.offset, x.shape)
        if self.scale is not None:
            x = x * _spread(self.scale, x.shape)
        return x if self.mask is None else np.where(self.mask, x, 0)

    def emit(self, name: str) -> Any:
        """Emit the weight; see ``coremltools.convert`` for the ops."""
        if self.mask is not None:
            return self._emit_sparse(self.mask, name)
        if self.tables is None:
            limits = self.integers or (0, 0)
            return emit_shift_scale(self.x, self.scale, self.offset, limits, name)
        tables, offset = self._stored_tables(self.tables)
        axis = self.vector_axis if tables.shape[-1] > 1 else None
        if self.scale is None:
            return emit_look_up(self.x, tables, axis, name)
        looked_up = emit_look_up(self.x, tables, axis, f"{name}_table")
        return _shift_scale(looked_up, self.scale, offset, name)

    def _emit_sparse(self, mask: _Array, name: str) -> Any:
        nonzero = self.x[mask]
        if not is_blockwise():
            return mb.constexpr_sparse_to_dense(
                nonzero_data=nonzero,
                mask=np.packbits(mask, bitorder="little"),
                shape=np.array(mask.shape, np.uint32),
                name=name,
            )
        _, bit = pad_tables(np.zeros((2, 1)))
        bits, data, scale, offset = mask.astype(bit), nonzero, self.scale, self.offset
        if self.tables is not None:
            tables, offset = self._stored_tables(self.tables)
            tables, dtype = pad_tables(tables)
            bits, data = mb.constexpr_lut_to_sparse(
                indices_mask=bits,
                indices_nonzero_data=nonzero.astype(dtype),
                lut=tables,
                name=f"{name}_table",
            )
        elif self.integers is not None:
            data, offset = narrow(nonzero, offset, self.integers, INTEGERS)
        if self.integers is not None:
            bits, data = mb.constexpr_sparse_blockwise_shift_scale(
                data_mask=bits,
                nonzero_data=data,
                scale=scale,
                name=f"{name}_scaled",
                **({} if offset is None else {"offset": offset}),
            )
            scale = None
        if scale is None:
            return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=bits, name=name)
        dense = mb.constexpr_sparse_to_dense(nonzero_data=data, mask=bits, name=f"{name}_dense")
        return _shift_scale(dense, scale, offset, name)

    def _stored_tables(self, tables: _Array) -> tuple[_Array, _Array | None]:
        """Return tables, and the offset of their integers, in the types of Core ML."""
        if self.integers is None:
            return tables.astype(np.float32), None
        return narrow(tables, self.offset, self.integers, BYTES)


def _shift_scale(data: Any, scale: _Array, offset: _Array | None, name: str) -> Any:
    option = {} if offset is None else {"offset": offset}
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name=name, **option)


def _by_block(parameter: _Array | None, shape: Sequence[int]) -> _Array | None:
    """Return a parameter with the rank of the weight, in float32."""
    if parameter is None:
        return None
    return parameter.astype(np.float32).reshape(scale_blocks(parameter.shape, shape))


def _spread(parameter: _Array, shape: Sequence[int]) -> _Array:
    """Return a parameter per block with a value per element, or an array that broadcasts to it.

    Args:
        parameter: Of the rank of the weight.
        shape: Of the weight or, with two more dimensions, of its lookup tables.
    """
    parameter = parameter.reshape(*parameter.shape, *(1,) * (len(shape) - parameter.ndim))
    for axis, (count, size) in enumerate(zip(parameter.shape, shape, strict=True)):
        if 1 < count < size:
            parameter = np.repeat(parameter, size // count, axis)
    return parameter


def _divide(values: _Array, scale: _Array) -> _Array:
    """Return ``values / scale``, and 0 where the scale is 0."""
    divisor = np.broadcast_to(_spread(scale, values.shape), values.shape)
    return np.divide(values, divisor, out=np.zeros_like(values), where=divisor != 0)


def _quantize(
    values: _Array, scale: _Array, offset: _Array | None, bits: int
) -> tuple[_Array, tuple[int, int]]:
    """Return ``values / scale + offset`` as integers, and their smallest and largest value.

    They are unsigned if none is negative, as by ``coremltools.convert``.
    """
    integers = np.round(_divide(values, scale))
    least = float(integers.min())
    if offset is not None:
        integers = integers + _spread(offset, values.shape)
        least = min(float(integers.min()), float(offset.min()))
    low = 0 if least >= 0 else -(2 ** (bits - 1))
    high = low + 2**bits - 1
    return np.clip(integers, low, high).astype(np.int16), (low, high)


def _tiles(shape: Sequence[int], groups: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Yield the position of each group, and the slices of its elements."""
    sizes = [size // count for size, count in zip(shape, groups, strict=True)]
    for group in np.ndindex(*groups):
        yield group, tuple(slice(n * s, (n + 1) * s) for n, s in zip(group, sizes, strict=True))


def _nearest(values: _Array, tables: _Array, axis: int) -> _Array:
    """Return the index of the nearest entry of each value, or of each vector along ``axis``."""
    length = tables.shape[-1]
    axis = axis % values.ndim
    shape = list(values.shape)
    shape[axis : axis + 1] = [shape[axis] // length, length]
    vectors = np.moveaxis(values.reshape(shape), axis + 1, -1)
    indices = np.empty(vectors.shape[:-1], np.uint8)
    find = _nearest_number if length == 1 else _nearest_vector
    for group, part in _tiles(indices.shape, tables.shape[:-2]):
        nearest = find(vectors[part].reshape(-1, length), tables[group])
        indices[part] = nearest.reshape(indices[part].shape)
    return indices


def _nearest_number(values: _Array, table: _Array) -> _Array:
    entries, first = np.unique(table[:, 0], return_index=True)
    return first[np.searchsorted((entries[1:] + entries[:-1]) / 2, values[:, 0])]


def _nearest_vector(vectors: _Array, table: _Array) -> _Array:
    starts = range(0, len(vectors), _CHUNK)
    chunks = (vectors[start : start + _CHUNK, None] - table for start in starts)
    return np.concatenate([(chunk**2).sum(-1).argmin(-1) for chunk in chunks])


def _look_up(indices: _Array, tables: _Array, axis: int) -> _Array:
    """Return the entries of tables, with vectors along ``axis``."""
    length = tables.shape[-1]
    axis = axis % indices.ndim
    vectors = np.empty((*indices.shape, length), np.float32)
    for group, part in _tiles(indices.shape, tables.shape[:-2]):
        vectors[part] = tables[group][indices[part]]
    shape = list(indices.shape)
    shape[axis] *= length
    return np.moveaxis(vectors, -1, axis + 1).reshape(shape)


def _translate(context: Any, node: Any) -> None:
    weight, *record = (value_in(context, name) for name in node.inputs)
    context.add(_StoredWeight.of(weight, *record).emit(node.name))


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    "coreml_delegate::recorded_weight": _translate,
}
"""The translation of the op; it takes coremltools' context and the node."""
