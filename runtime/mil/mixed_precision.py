"""Programs in fp16 with ops in fp32, and the casts that coremltools inserts around these ops.

The ops of the outermost block are chosen one by one, by the name of their first output. Constants
of a chosen op have the values from before the cast to fp16, if the model stores them. Between two
chosen ops values stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    STATE_OPERAND,
    Binding,
    Constant,
    Function,
    NamedType,
    Op,
    Ref,
    TensorType,
    ValueType,
)
from coreml_delegate.runtime.mil.widening import Widening

_WIDER = {DType.FP16: DType.FP32}
_STRING = TensorType(DType.STRING, ())
# No name of MIL has a colon.
_WIDE, _NARROW = ":fp32", ":fp16"


def in_fp32(name: str) -> str:
    """Return the name of the fp32 value of an op in fp32; see ``MixedPrecision.mix``."""
    return name + _WIDE


def in_fp16(name: str) -> str:
    """Return the name of the value that ``MixedPrecision.compare`` computes in fp16."""
    return name + _NARROW


def original_name(name: str) -> str:
    """Return the name in the function of a value in fp32 or fp16."""
    return name.removesuffix(_WIDE).removesuffix(_NARROW)


def fp16_ops(function: Function) -> list[Op]:
    """Return the ops that read or return fp16 and can compute in fp32, in order.

    Constants, compressed weights, accesses of states and control flow are not among them, nor casts
    between floating-point types.
    """
    types = _types(function)
    return [
        op
        for op in function.block.ops
        if op.outputs
        and not (op.type.startswith("const") or op.type in STATE_OPERAND or op.blocks)
        and all(isinstance(output.type, TensorType) for output in op.outputs)
        and not _casts_floats(op, types)
        and any(
            _dtype(declared) is DType.FP16
            for declared in (*(o.type for o in op.outputs), *_operand_types(op, types))
        )
    ]


def float_casts(function: Function) -> list[Op]:
    """Return the casts between floating-point types; see ``fp16_ops``."""
    types = _types(function)
    return [op for op in function.block.ops if _casts_floats(op, types)]


class MixedPrecision:
    """Programs that compute chosen ops of a function in fp32.

    Programs of one object have their common ops and constants as the same objects.

    Args:
        function: A function in fp16.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._parts = _Parts(
            _types(function),
            {op.outputs[0].name: op for op in function.block.ops if op.type == "const"},
            frozenset(float_casts(function)),
        )
        self._widening = Widening(_WIDER, function.fp32_constants or {})

    def mix(self, chosen: Collection[str]) -> Function:
        """Return the function in which chosen ops compute in fp32.

        Args:
            chosen: Names of the first outputs of ops; see ``fp16_ops``.

        Returns:
            A function with the same inputs, outputs and states. A value ``y`` of a chosen op is
            also there in fp32, as ``in_fp32("y")``.
        """
        return self._mixed(chosen, with_twins=False)

    def compare(self) -> Function:
        """Return a function that computes every op in fp32, and once more in fp16.

        In fp16 an op reads the fp32 values of its operands, rounded; so the difference of both
        values is the error of this op and of its operands, without the errors of earlier ops. The
        values are ``in_fp32("y")`` and ``in_fp16("y")``.
        """
        names = [op.outputs[0].name for op in fp16_ops(self._function)]
        return self._mixed(names, with_twins=True)

    def _mixed(self, chosen: Collection[str], *, with_twins: bool) -> Function:
        mixer = _Mixer(self._parts, self._widening, chosen, with_twins=with_twins)
        block = self._function.block
        return replace(self._function, block=replace(block, ops=mixer.mix(block.ops)))


def _dtype(declared: ValueType | None) -> DType | None:
    return declared.dtype if isinstance(declared, TensorType) else None


def _types(function: Function) -> dict[str, ValueType]:
    types = {param.name: param.type for param in function.params}
    for op in function.block.ops:
        types.update((output.name, output.type) for output in op.outputs)
    return types


def _casts_floats(op: Op, types: Mapping[str, ValueType]) -> bool:
    """Whether an op only casts between floating-point types."""
    if op.type != "cast":
        return False
    ends = _dtype(types.get(_source(op))), _dtype(op.outputs[0].type)
    return all(dtype is not None and dtype.is_float for dtype in ends)


def _source(op: Op) -> str:
    """Return the name of the value that a cast reads."""
    source = op.inputs["x"][0]
    return source.name if isinstance(source, Ref) else ""


def _operand_types(op: Op, types: Mapping[str, ValueType]) -> list[ValueType | None]:
    bindings = [binding for bound in op.inputs.values() for binding in bound]
    return [types.get(b.name) if isinstance(b, Ref) else b.type for b in bindings]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts that the programs of a function have in common.

    Attributes:
        types: Types of the values of the function, by name.
        constants: Constants of the function, by name.
        casts: Casts between floating-point types.
        new_ops: Ops of the programs, by the op that they stand for and the names of their operands.
    """

    types: Mapping[str, ValueType]
    constants: Mapping[str, Op]
    casts: Collection[Op]
    new_ops: dict[tuple[object, ...], Op] = field(default_factory=dict["tuple[object, ...]", Op])

    def op_for(self, key: tuple[object, ...], make: Callable[[], Op]) -> Op:
        """Return the op with this key, made by ``make`` the first time."""
        if key not in self.new_ops:
            self.new_ops[key] = make()
        return self.new_ops[key]


class _Mixer:
    """Builds the block of a mixed function, op by op.

    ``_wide`` has the most exact fp32 value of every narrow value; ``_computed`` the narrow values
    that chosen ops compute.
    """

    def __init__(
        self, parts: _Parts, widening: Widening, chosen: Collection[str], *, with_twins: bool
    ) -> None:
        self._parts = parts
        self._widening = widening
        self._chosen = frozenset(chosen)
        self._with_twins = with_twins
        self._wide: dict[str, str] = {}
        self._computed: set[str] = set()
        self._ops: list[Op] = []

    def mix(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        for op in ops:
            if op in self._parts.casts:
                self._add_cast(op)
            elif op.type != "const" and op.outputs and op.outputs[0].name in self._chosen:
                self._add_wide(op)
            else:
                self._ops.append(op)
        return tuple(self._ops)

    def _add_cast(self, op: Op) -> None:
        """Add a cast between floating-point types; chosen ops read its operand."""
        source, result = _source(op), op.outputs[0]
        wide = self._wide.get(source)
        if source in self._computed and _dtype(result.type) is DType.FP32 and wide is not None:
            inputs = {**op.inputs, "x": (Ref(wide),)}
            self._ops.append(self._parts.op_for((op, wide), lambda: replace(op, inputs=inputs)))
        else:
            self._ops.append(op)
        if wide is not None:
            self._wide[result.name] = wide
        elif _dtype(self._parts.types.get(source)) is DType.FP32:
            self._wide[result.name] = source

    def _add_wide(self, op: Op) -> None:
        """Add a chosen op in fp32, casts of its results to fp16, and the op in fp16."""
        names = tuple(self._wide_name(name) for name in op.references())
        wide_op = self._parts.op_for((op, *names), lambda: self._in_fp32(op))
        self._ops.append(wide_op)
        for output, wide in zip(op.outputs, wide_op.outputs, strict=True):
            if wide.name != output.name:
                self._ops.append(self._cast(wide.name, output))
                self._wide[output.name] = wide.name
                self._computed.add(output.name)
        if self._with_twins:
            twins = tuple(replace(output, name=in_fp16(output.name)) for output in op.outputs)
            self._ops.append(replace(op, outputs=twins))

    def _in_fp32(self, op: Op) -> Op:
        """Return a chosen op in fp32; its operands have been widened."""
        outputs = [
            replace(o, name=in_fp32(o.name)) if _dtype(o.type) is DType.FP16 else o
            for o in op.outputs
        ]
        inputs = {
            name: tuple(map(self._wide_operand, bindings)) for name, bindings in op.inputs.items()
        }
        return replace(op, inputs=inputs, outputs=tuple(map(self._widening.named, outputs)))

    def _wide_operand(self, binding: Binding) -> Binding:
        if isinstance(binding, Constant):
            return self._widening.binding(binding)
        return Ref(self._wide[binding.name])

    def _wide_name(self, name: str) -> str:
        """Return the name of the most exact value of an operand, which is added if necessary."""
        if name not in self._wide:
            self._wide[name] = self._widen(name)
        return self._wide[name]

    def _widen(self, name: str) -> str:
        """Return the name of a value in fp32, which is added; the name itself of other values."""
        if name in self._parts.constants:
            constant = self._parts.constants[name]
            wide = self._parts.op_for((constant,), lambda: self._wide_constant(constant))
            if wide is not constant:
                self._ops.append(wide)
            return wide.outputs[0].name
        declared = self._parts.types.get(name)
        if declared is None or _dtype(declared) is not DType.FP16:
            return name
        wide = self._widening.named(NamedType(in_fp32(name), declared))
        self._ops.append(self._cast(name, wide))
        return wide.name

    def _wide_constant(self, constant: Op) -> Op:
        """Return a constant in fp32 by another name; the constant itself if it is not fp16."""
        wide = self._widening.op(constant)
        if wide.attributes == constant.attributes:
            return constant
        output = wide.outputs[0]
        return replace(wide, outputs=(replace(output, name=in_fp32(output.name)),))

    def _cast(self, source: str, result: NamedType) -> Op:
        return self._parts.op_for((source, result.name), lambda: _cast(source, result))


def _cast(source: str, result: NamedType) -> Op:
    dtype = _dtype(result.type)
    label = "" if dtype is None else dtype.label
    inputs = {"x": (Ref(source),), "dtype": (Constant(_STRING, label),)}
    return Op("cast", inputs, (result,))
