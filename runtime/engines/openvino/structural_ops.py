"""Structural ops, which need the scope: constants, states, branches and loops.

A branch becomes a body of OpenVINO's ``If``, a loop becomes a ``Loop``. MIL tests the condition
before each iteration and OpenVINO after it, so the condition is translated twice: before the loop
for the first iteration, and after the body for later iterations. A state that a body writes is an
additional result of the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino.blocks import (
    BlockTranslator,
    StructuralOp,
    read_literal,
)
from coreml_delegate.runtime.engines.openvino.graph import (
    GRAPH_TYPE,
    constant_data,
    convert_to,
    element_type,
    fail_if,
    ints,
    is_computed,
    make_model,
    rank,
    reshape,
)
from coreml_delegate.runtime.engines.openvino.scope import Scope, partial_shape
from coreml_delegate.runtime.engines.openvino.values import TensorList, Value, Weight, refusal
from coreml_delegate.runtime.mil.program import (
    STATE_OPERAND,
    WRITTEN_OPERAND,
    Block,
    Constant,
    ListType,
    NamedType,
    Op,
    Ref,
    TensorType,
    ValueType,
)


def const(_: BlockTranslator, op: Op, __: Scope) -> tuple[Value, ...]:
    """Return the constant; it becomes a node when a tensor is needed."""
    return (op.attributes["val"],)


def read_state(_: BlockTranslator, op: Op, scope: Scope) -> tuple[Value, ...]:
    """Return the value of the state at this point of the program."""
    return (scope.state(_state_name(op)),)


def write_state(_: BlockTranslator, op: Op, scope: Scope) -> tuple[Value, ...]:
    """Replace the state; ``coreml_update_state`` also returns the new value."""
    (binding,) = op.inputs[WRITTEN_OPERAND[op.type]]
    value = scope.tensor(scope.value(binding))
    scope.set_state(_state_name(op), value)
    return (value,) if op.outputs else ()


def cond(translator: BlockTranslator, op: Op, scope: Scope) -> tuple[Value, ...]:
    """Return the results of the first block if the predicate is true, else of the second."""
    (binding,) = op.inputs["pred"]
    predicate = scope.value(binding)
    if isinstance(predicate, Constant | Weight) or constant_data(predicate) is not None:
        chosen = op.blocks[0 if bool(read_literal("pred", predicate)) else 1]
        return tuple(translator.block(chosen, scope.nested()))
    states = _written_states(op.blocks)
    then_scope, else_scope = scope.body(), scope.body()
    values, then = _branch(translator, op.blocks[0], op.outputs, states, then_scope)
    _, otherwise = _branch(translator, op.blocks[1], op.outputs, states, else_scope)
    # Any, because the type stub does not allow None for a body without the capture.
    node: Any = ops.if_op(_as_scalar_flag(predicate))
    node.set_then_body(then)
    node.set_else_body(otherwise)
    for capture in then_scope.captures:
        node.set_input(capture.outer, capture.parameter, None)
    for capture in else_scope.captures:
        node.set_input(capture.outer, None, capture.parameter)
    outputs = [
        node.set_output(*pair)
        for pair in zip(then.get_results(), otherwise.get_results(), strict=True)
    ]
    return _bind_results(values, outputs, states, scope)


def while_loop(translator: BlockTranslator, op: Op, scope: Scope) -> tuple[Value, ...]:
    """Run the second block while the first returns true; both take the loop variables."""
    condition, body = op.blocks
    initial = [scope.value(binding) for binding in op.inputs.get("loop_vars", ())]
    states = _written_states(op.blocks)
    first = _translate_condition(translator, condition, scope, initial)
    constant = constant_data(first)
    if constant is not None and not constant.item():
        return tuple(initial)
    starts = [_to_tensor(value, scope) for value in initial] + [scope.state(n) for n in states]
    shapes = [_shape(n.type, v) for n, v in zip(body.inputs, initial, strict=True)]
    shapes += [value.get_partial_shape() for value in starts[len(initial) :]]
    inner = scope.body()
    parameters = [
        ov.op.Parameter(element_type(start), shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]
    carry = [parameter.output(0) for parameter in parameters]
    for name, value in zip(states, carry[len(initial) :], strict=True):
        inner.set_state(name, value)
    variables = [_from_tensor(like, t) for like, t in zip(initial, carry, strict=False)]
    computed = translator.block(body, inner, variables)
    goes_on = _translate_condition(translator, condition, inner, computed)
    results = [_to_tensor(value, inner) for value in computed] + [inner.state(n) for n in states]
    results = [
        convert_to(value, element_type(start)) for value, start in zip(results, starts, strict=True)
    ]
    turn = ov.op.Parameter(ov.Type.i32, ov.PartialShape([]))
    results = [
        _copy_of_other(value, own, parameters, turn)
        for value, own in zip(results, parameters, strict=True)
    ]
    next_turn = ops.add(turn, ints(1))
    model = _make_body([goes_on, next_turn, *results], [turn, *parameters], inner)
    node = ops.loop(ints(limits.MAX_TURNS + 1).output(0), first)
    node.set_function(model)
    node.set_special_body_ports([-1, 0])
    _, turns, *ends = (result.output(0) for result in model.get_results())
    node.set_merged_input(turn, ints(0).output(0), turns)
    for parameter, start, end in zip(parameters, starts, ends, strict=True):
        node.set_merged_input(parameter, start, end)
    for capture in inner.captures:
        node.set_invariant_input(capture.parameter, capture.outer)
    endless = ops.greater(node.get_iter_value(turns, -1), ints(limits.MAX_TURNS))
    reason = f"a loop has more than {limits.MAX_TURNS} turns"
    outputs = [fail_if(endless, node.get_iter_value(end, -1), reason) for end in ends]
    return _bind_results(initial, outputs, states, scope)


STRUCTURAL: Mapping[str, StructuralOp] = {
    "cond": cond,
    "const": const,
    "coreml_update_state": write_state,
    "read_state": read_state,
    "while_loop": while_loop,
    "write_state": write_state,
}
"""The ops of this module by type."""


def _branch(
    translator: BlockTranslator,
    block: Block,
    declared: Sequence[NamedType],
    states: Sequence[str],
    scope: Scope,
) -> tuple[list[Value], Any]:
    """Return the outputs of a block, and a model whose results are the outputs and the states."""
    values = translator.block(block, scope)
    results = [
        convert_to(_to_tensor(value, scope), GRAPH_TYPE[_element_of(named.type).dtype])
        for value, named in zip(values, declared, strict=True)
    ]
    results += [scope.state(name) for name in states]
    return values, _make_body(results, [], scope)


def _copy_of_other(value: Any, own: Any, parameters: Sequence[Any], turn: Any) -> Any:
    """Return a loop variable's next value, copied if it may be a view of another variable.

    A chain of ops with one operand may be views, such as transposes of sizes of 1. The plugin
    replaces the variables one after another, in place. ``own`` is the variable's parameter, among
    the ``parameters`` of all, and ``turn`` the number of the iteration.
    """
    source = value.get_node()
    while len(before := _computed_operands(source)) == 1:
        (source,) = before.values()
    other_names = [
        parameter.get_friendly_name() for parameter in parameters if parameter is not own
    ]
    if source.get_friendly_name() not in other_names:
        return value
    is_turn = ops.greater_equal(turn, ints(0))  # with a constant the copy would be folded
    zero = ops.constant(np.zeros((), bool), element_type(value))
    return ops.select(is_turn, value, zero).output(0)


def _computed_operands(node: Any) -> dict[str, Any]:
    """Return the nodes that compute the operands of a node, by name."""
    nodes = (value.get_node() for value in node.input_values() if is_computed(value))
    return {node.get_friendly_name(): node for node in nodes}


def _translate_condition(
    translator: BlockTranslator, condition: Block, scope: Scope, variables: Sequence[Value]
) -> Any:
    """Return the flag whether the loop runs another iteration with these variables."""
    (flag,) = translator.block(condition, scope.nested(), variables)
    return _as_scalar_flag(scope.tensor(flag))


def _as_scalar_flag(value: Any) -> Any:
    """Return a boolean tensor of one element as the scalar that OpenVINO needs."""
    flag = convert_to(value, ov.Type.boolean)
    return flag if rank(flag) == 0 else reshape(flag, ()).output(0)


def _make_body(results: Sequence[Any], parameters: Sequence[Any], scope: Scope) -> Any:
    captured = [capture.parameter for capture in scope.captures]
    return make_model([ops.result(value) for value in results], [*parameters, *captured], "body")


def _bind_results(
    like: Sequence[Value], outputs: Sequence[Any], states: Sequence[str], scope: Scope
) -> tuple[Value, ...]:
    """Set the states to the last outputs; return the first outputs, as lists where ``like`` is."""
    for name, value in zip(states, outputs[len(like) :], strict=True):
        scope.set_state(name, value)
    return tuple(_from_tensor(value, tensor) for value, tensor in zip(like, outputs, strict=False))


def _to_tensor(value: Value, scope: Scope) -> Any:
    """Return the tensor by which a value enters or leaves a body."""
    return value.elements if isinstance(value, TensorList) else scope.tensor(value)


def _from_tensor(like: Value, tensor: Any) -> Value:
    """Return a tensor that entered or left a body as a list if ``like`` is a list."""
    return TensorList(tensor, like.grows) if isinstance(like, TensorList) else tensor


def _element_of(type_: ValueType) -> TensorType:
    tensor = type_.element if isinstance(type_, ListType) else type_
    if not isinstance(tensor, TensorType):
        raise refusal("value of a block that is no tensor", type_)
    return tensor


def _shape(type_: ValueType, initial: Value) -> Any:
    """Return the shape that a variable has in every iteration."""
    element = _element_of(type_)
    if isinstance(type_, ListType) and element.shape is not None:
        # A list that grows is declared with its initial length.
        grows = isinstance(initial, TensorList) and initial.grows
        return partial_shape((None if grows else type_.length, *element.shape))
    return partial_shape(element.shape)


def _written_states(blocks: Sequence[Block]) -> list[str]:
    """Return the names of the states that blocks write, each once."""
    writes = [op for block in blocks for op in block.walk() if op.type in WRITTEN_OPERAND]
    return list(dict.fromkeys(map(_state_name, writes)))


def _state_name(op: Op) -> str:
    (binding,) = op.inputs[STATE_OPERAND[op.type]]
    if not isinstance(binding, Ref):
        raise refusal("state", "a constant", "a parameter of the function")
    return binding.name
