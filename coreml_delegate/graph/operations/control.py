"""Closures, calls, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, const
from coreml_delegate.graph.emitter import Emitter, operation
from coreml_delegate.graph.node import Closure, Node, Scope, Value, as_tuple, needed_nodes
from coreml_delegate.graph.tensor_types import ALL, BOOLEANS, DType, TensorType
from coreml_delegate.mil.compose import mb
from coreml_delegate.patches.coremltools import forget_value

Function = Callable[..., Any] | Closure
"""A function of values: a closure, or a Python function to trace."""

_FLAG = TensorType(DType.BOOL, ())


def opaque(var: Var) -> Var:
    """Return a copy that coremltools does not fold as a constant while it builds the program."""
    copy = mb.identity(x=var)
    forget_value(copy)
    return copy


def _compose_while(c: Composer, node: Node, *initial: Var | None) -> tuple[Var | None, ...]:
    condition, body = node.closures["condition"], node.closures["body"]
    changing = [
        n
        for n, var in enumerate(initial)
        if var is not None and body.results[n] is not body.parameters[n]
    ]
    if not changing:  # such a loop has no iteration, or no end
        return initial

    def all_variables(changed: Sequence[Var]) -> list[Var | None]:
        variables = list(initial)
        for n, var in zip(changing, changed, strict=True):
            variables[n] = var
        return variables

    def test(*variables: Var) -> Var:
        (flag,) = _block_results(c.call(condition, all_variables(variables)))
        return flag

    def iterate(*variables: Var) -> tuple[Var, ...]:
        results = c.call(body, all_variables(variables))
        return _block_results([results[n] for n in changing])

    # coremltools would take a variable that starts as a constant for a constant in the body.
    loop_vars = tuple(opaque(initial[n]) for n in changing)
    final_vars = mb.while_loop(_cond=test, _body=iterate, loop_vars=loop_vars)
    return tuple(all_variables(as_tuple(final_vars)))


def _compose_branches(
    c: Composer, node: Node, selector: Var, *operands: Var | None
) -> tuple[Var | None, ...]:
    """Call one of the closures: the first if a flag is true, or the closure of an index."""
    branches = list(node.closures.values())
    predicates = [selector]
    if node.types[0].dtype is not DType.BOOL:
        indices = range(len(branches) - 1)
        predicates = [mb.equal(x=selector, y=const(n, DType.INT32)) for n in indices]
    return _choose(c, node, predicates, branches, operands)


def _choose(
    c: Composer,
    node: Node,
    predicates: Sequence[Var],
    closures: Sequence[Closure],
    operands: Sequence[Var | None],
) -> tuple[Var | None, ...]:
    """Call the closure of the first true predicate, else the last; return its results."""
    if not predicates or predicates[0].val is not None:
        is_first = not predicates or bool(predicates[0].val)
        if is_first:
            return c.call(closures[0], operands)
        return _choose(c, node, predicates[1:], closures[1:], operands)
    nonempty = [n for n, result in enumerate(node.results) if not result.type.is_empty]

    def nonempty_results(results: Sequence[Var | None]) -> tuple[Var, ...]:
        return _block_results([results[n] for n in nonempty])

    chosen = mb.cond(
        pred=predicates[0],
        _true_fn=lambda: nonempty_results(c.call(closures[0], operands)),
        _false_fn=lambda: nonempty_results(
            _choose(c, node, predicates[1:], closures[1:], operands)
        ),
    )
    results: list[Var | None] = [None] * len(node.results)
    for n, var in zip(nonempty, as_tuple(chosen), strict=True):
        results[n] = var
    return tuple(results)


def _block_results(vars: Sequence[Var]) -> tuple[Var, ...]:
    """Return results of the current block as distinct values that its ops compute.

    coremltools treats a loop variable as loop-invariant if the body returns a value from outside,
    and moves constants outside.
    """
    from coremltools.converters.mil.mil.block import curr_block

    results: list[Var] = []
    for var in vars:
        is_computed = var.op is not None and var.op.enclosing_block is curr_block()
        is_new = is_computed and var.val is None and all(var is not other for other in results)
        results.append(var if is_new else opaque(var))
    return tuple(results)


class Control(Emitter):
    """Closures, calls, branches and loops.

    A function argument is a closure, or a Python function, which is called once with new
    values. Functions may use values of the outer scopes; they return one value or several.
    """

    def closure(self, name: str, function: Callable[..., Any], *types: TensorType) -> Closure:
        """Trace a Python function into a closure.

        Args:
            name: Name in messages.
            function: Takes a value for each type; returns a value, or a sequence of values.
            types: Types of its parameters.

        Raises:
            GraphError: The function returns something else.
        """
        return self.trace(name, function, types)

    @operation(ALL)
    def call(self, closure: Closure, *arguments: Value) -> tuple[Value, ...]:
        """Inline a closure: copy its nodes to this scope, and return the results.

        Raises:
            GraphError: Arguments of wrong types, or a closure of another graph.
        """
        closure = self._closure_of("call", closure, [value.type for value in arguments])
        values = dict(zip(closure.parameters, arguments, strict=True))
        _copy_nodes(closure, self.scope, values)
        return tuple(values.get(result, result) for result in closure.results)

    @operation(ALL, _compose_while)
    def while_(self, condition: Function, body: Function, *initial: Value) -> tuple[Value, ...]:
        """Return the variables of a loop after its last iteration.

        Args:
            condition: Takes the variables; returns a bool of rank 0, whether to iterate again.
            body: Takes the variables; returns their new values, of the same types.
            initial: The variables before the first iteration.

        Raises:
            GraphError: Functions of other types, or no variables.
        """
        if not initial:
            raise GraphError("while has no variables", expected="at least one")
        types = [value.type for value in initial]
        closures = {
            "condition": self._closure_of("condition", condition, types, [_FLAG]),
            "body": self._closure_of("body", body, types, types),
        }
        return self.emit("while", initial, types, closures=closures)

    @operation(BOOLEANS, _compose_branches)
    def if_(
        self, predicate: Value, on_true: Function, on_false: Function, *operands: Value
    ) -> tuple[Value, ...]:
        """Return the results of one of two functions.

        Args:
            predicate: A bool of rank 0.
            on_true: Takes the operands; called if the predicate is true.
            on_false: Takes the operands; called if it is false. Its results have the same types.
            operands: Arguments of the functions.

        Raises:
            GraphError: A predicate of another rank, or functions of other types.
        """
        _require_rank_0("the predicate of if", predicate)
        types = [value.type for value in operands]
        first = self._closure_of("on_true", on_true, types)
        returned = [result.type for result in first.results]
        second = self._closure_of("on_false", on_false, types, returned)
        closures = {"on_true": first, "on_false": second}
        return self.emit("if", (predicate, *operands), returned, closures=closures)

    @operation({DType.INT32}, _compose_branches)
    def case(
        self, index: Value, branches: Sequence[Function], *operands: Value
    ) -> tuple[Value, ...]:
        """Return the results of one of several functions.

        Args:
            index: Index of the function, of rank 0; out of range, the last function is called.
            branches: The functions, which take the operands; their results have the same types.
            operands: Arguments of the functions.

        Raises:
            GraphError: An index of another rank, no functions, or functions of other types.
        """
        _require_rank_0("the index of case", index)
        if not branches:
            raise GraphError("case has no branches", expected="at least one")
        types = [value.type for value in operands]
        closures: dict[str, Closure] = {}
        returned: list[TensorType] | None = None
        for n, branch in enumerate(branches):
            closure = self._closure_of(f"branch {n}", branch, types, returned)
            closures[f"branch_{n}"] = closure
            returned = [result.type for result in closure.results]
        return self.emit("case", (index, *operands), returned or (), closures=closures)

    def _closure_of(
        self,
        name: str,
        function: Function,
        parameter_types: Sequence[TensorType],
        result_types: Sequence[TensorType] | None = None,
    ) -> Closure:
        """Return a function as a closure of this scope, and check its types."""
        if not isinstance(function, Closure):
            function = self.trace(name, function, parameter_types)
        elif function.scope.outer is None or not self.scope.sees(function.scope.outer):
            raise GraphError(
                "the closure belongs to another graph, or to a closure that is complete",
                got=repr(function.name),
            )
        function.check(parameter_types, result_types)
        return function


def _require_rank_0(what: str, value: Value) -> None:
    if value.rank:
        raise GraphError(f"{what} is no scalar", got=str(value.type), expected="rank 0")


def _copy_nodes(closure: Closure, scope: Scope, values: dict[Value, Value]) -> None:
    """Copy a closure's nodes to the end of a scope.

    ``values`` has the value of the scope for each value of the closure; the copies are added.
    """
    for node in needed_nodes(closure.scope, closure.results):
        if node.results and node.results[0] in values:
            continue
        closures = {
            name: _copy_closure(inner, scope, values) for name, inner in node.closures.items()
        }
        operands = tuple(values.get(operand, operand) for operand in node.operands)
        copy = Node(node.record, operands, node.attributes, closures, scope)
        copy.results = tuple(Value(copy, v.index, v.type, v.elements) for v in node.results)
        scope.nodes.append(copy)
        values.update(zip(node.results, copy.results, strict=True))


def _copy_closure(closure: Closure, outer: Scope, values: dict[Value, Value]) -> Closure:
    scope = Scope(outer)
    inner = dict(values)
    for parameter in closure.parameters:
        node = Node(parameter.node.record, (), {}, {}, scope)
        node.results = (Value(node, 0, parameter.type),)
        scope.nodes.append(node)
        inner[parameter] = node.results[0]
    _copy_nodes(closure, scope, inner)
    return Closure(
        closure.name,
        scope,
        tuple(inner[parameter] for parameter in closure.parameters),
        tuple(inner.get(result, result) for result in closure.results),
    )
