"""Cases of closures, calls, branches, loops and sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph.gomlx.case import case, f32, flags, i32, i64


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a closure of its arguments' types."""

    def build(b: Any, *values: Any) -> Any:
        closure = b.closure(
            "closure", lambda *given: function(b, *given), *(value.type for value in values)
        )
        return b.call(closure, *values)

    return build


def _constants(b: Any, *numbers: float) -> tuple[Any, ...]:
    return tuple(b.constant(f32([number, number])) for number in numbers)


def _chained(b: Any, x: Any) -> Any:
    one, two, three = _constants(b, 1, 2, 3)
    return b.subtract(b.multiply(b.add(x, one), two), three)


def _two_results(b: Any, x: Any) -> Any:
    one, two = _constants(b, 1, 2)
    return b.add(x, one), b.multiply(x, two)


def _captured(b: Any, y: Any) -> Any:
    outside = b.constant(f32([10, 20]))
    return _called(lambda b, y: b.add(outside, y))(b, y)


def _captured_from_beyond(operation: str, *numbers: float) -> Callable[..., Any]:
    """Return a function with a closure in a closure, which uses a value outside of both."""

    def build(b: Any, y: Any) -> Any:
        outside = b.constant(f32(numbers))
        return _called(lambda b, y: _called(lambda b, y: getattr(b, operation)(outside, y))(b, y))(
            b, y
        )

    return build


def _counted(b: Any) -> Any:
    return b.while_(
        lambda count: b.less(count, b.constant(5)),
        lambda count: b.add(count, b.constant(1)),
        b.constant(0),
    )


def _counted_from(b: Any, start: Any) -> Any:
    step, limit = b.constant(1.0), b.constant(5.0)
    return b.while_(lambda count: b.less(count, limit), lambda count: b.add(count, step), start)


def _chosen_product(b: Any, predicate: Any) -> Any:
    outside = b.constant(f32([10, 20]))
    two, half = _constants(b, 2, 0.5)
    return b.if_(predicate, lambda: b.multiply(outside, two), lambda: b.multiply(outside, half))


_NUMBERS = f32([5, 2, 8, 1, 3])

CASES = [
    case(
        "Exec/CompileAndExecute",
        lambda b, x: (b.negate(x), b.constant(i64([1, 2, 3]))),
        [f32([3, 5, 7])],
        f32([-3, -5, -7]),
        i64([1, 2, 3]),
    ),
    case(
        "ClosureOperations",
        _called(lambda b: b.add(b.constant(f32([1, 2])), b.constant(f32([3, 4])))),
        [],
        f32([4, 6]),
    ),
    case("ClosureReturn", _called(lambda b: b.constant(f32([1, 2, 3]))), [], f32([1, 2, 3])),
    case(
        "CompiledClosureExecute",
        _called(lambda b, x, y: b.add(x, y)),
        [f32([1, 2, 3]), f32([10, 20, 30])],
        f32([11, 22, 33]),
    ),
    case(
        "CompiledClosureMultipleExecutions",
        _called(lambda b, x: b.multiply(x, *_constants(b, 2))),
        [f32([1, 2])],
        f32([2, 4]),
        more=[([f32([5, 10])], [f32([10, 20])]), ([f32([-1, 0])], [f32([-2, 0])])],
    ),
    case(
        "CompiledClosureWithConstants",
        _called(lambda b: b.add(b.constant(f32([1])), b.constant(f32([2])))),
        [],
        f32([3]),
    ),
    case(
        "CompiledClosureMultipleOutputs",
        _called(_two_results),
        [f32([5, 10])],
        f32([6, 11]),
        f32([10, 20]),
    ),
    case("CompiledClosureChainedOperations", _called(_chained), [f32([1, 2])], f32([1, 3])),
    case("ClosureExecuteWithCapturedValues", _captured, [f32([1, 2])], f32([11, 22])),
    case(
        "ClosureExecuteWithNestedCapturedValues",
        _captured_from_beyond("multiply", 100, 200),
        [f32([2, 3])],
        f32([200, 600]),
    ),
    case(
        "ClosureCapturingGrandparentNode",
        _captured_from_beyond("add", 1, 2),
        [f32([10, 20])],
        f32([11, 22]),
    ),
    case(
        "IfOperation",
        lambda b, predicate: b.if_(predicate, lambda: b.constant(10), lambda: b.constant(20)),
        [flags(True)],
        i32(10),
        more=[([flags(False)], [i32(20)])],
    ),
    case("WhileOperation", _counted, [], i32(5)),
    case(
        "SortOperation",
        lambda b, x: b.sort([x], 0, b.less, is_stable=False),
        [_NUMBERS],
        np.sort(_NUMBERS),
    ),
    case(
        "ClosureCaptureExecutionWithIf",
        _chosen_product,
        [flags(True)],
        f32([20, 40]),
        more=[([flags(False)], [f32([5, 10])])],
    ),
    case("ClosureCaptureExecutionWithWhile", _counted_from, [f32(0)], f32(5)),
]
