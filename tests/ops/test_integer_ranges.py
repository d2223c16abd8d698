"""Bounds of integers, against what the operations give."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lowering import Function
from torch.export import Dim

from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.ops.intervals import UNKNOWN, Interval


def _fmod(a: int, b: int) -> int:
    return a - b * _truncated(a, b)


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if a * b >= 0 else -1)


_BINARY: list[tuple[Callable[..., Any], Callable[[int, int], int]]] = [
    (operator.add, operator.add),
    (operator.sub, operator.sub),
    (operator.mul, operator.mul),
    (operator.floordiv, operator.floordiv),
    (operator.mod, operator.mod),
    (Interval.truncated_divide, _truncated),
    (Interval.truncated_modulo, _fmod),
    (Interval.maximum, max),
    (Interval.minimum, min),
    (Interval.bitwise_and, operator.and_),
]
_EXACT = (operator.add, operator.sub, operator.mul, Interval.maximum, Interval.minimum)
_SMALL = [Interval(a, b) for a, b in itertools.combinations_with_replacement(range(-4, 6, 2), 2)]


def _numbers(interval: Interval) -> range:
    assert interval.low is not None
    assert interval.high is not None
    return range(interval.low, interval.high + 1)


@pytest.mark.parametrize(("of_intervals", "of_numbers"), _BINARY)
def test_intervals_hold_every_result(of_intervals, of_numbers) -> None:
    divides = of_numbers in (operator.floordiv, operator.mod, _truncated, _fmod)
    for x, y in itertools.product(_SMALL, _SMALL):
        pairs = itertools.product(_numbers(x), _numbers(y))
        results = [of_numbers(a, b) for a, b in pairs if b or not divides]
        found = of_intervals(x, y)
        assert all(found.contains(result) for result in results), (x, y, found)
        if of_intervals in _EXACT:
            assert found == Interval(min(results), max(results))


@pytest.mark.parametrize("x", _SMALL, ids=str)
def test_intervals_of_one_operand(x: Interval) -> None:
    numbers = _numbers(x)
    assert abs(x) == Interval(min(map(abs, numbers)), max(map(abs, numbers)))
    assert -x == Interval(-numbers[-1], -numbers[0])
    for exponent in (2, 3):
        powers = [n**exponent for n in numbers]
        assert x**exponent == Interval(min(powers), max(powers))
    assert x.sign() == Interval(*((n > 0) - (n < 0) for n in (numbers[0], numbers[-1])))


def test_an_unknown_bound_is_known_once_it_is_limited() -> None:
    floored = UNKNOWN.maximum(Interval.point(3))
    assert floored == Interval(3, None)
    assert floored.minimum(Interval.point(9)) == Interval(3, 9)
    # int64 wraps around, so the lower bound of a sum is lost with the upper one.
    assert floored + Interval.point(1) == UNKNOWN
    assert UNKNOWN % Interval.point(7) == Interval(0, 6)


# Programs


_X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
_IDS = torch.randint(-(2**40), 2**40, (4, 6), generator=torch.Generator().manual_seed(0))


def _places(x, ids):
    values, order = torch.sort(ids % 9, -1)
    return x.argmax(), x.argmin(1), torch.topk(x, 3)[1], torch.max(x, 1)[1], order, values


def _made(x, ids):
    filled = (
        torch.full((3,), 9),
        torch.zeros_like(ids),
        torch.ones_like(ids),
        x.new_zeros(2, dtype=torch.long),
    )
    return *filled, torch.arange(9, -5, -2), torch.arange(2, 11, 4), torch.tensor([5, -7]) * 3


def _limited(x, ids):
    clamped = (
        ids.clamp(-5, 9),
        ids.clamp(min=3).clamp_max(8),
        torch.minimum(ids.clamp(0), ids[0] % 5),
    )
    remains = (
        ids % 7,
        ids % -7,
        torch.fmod(ids, 5),
        torch.remainder(ids, ids.clamp(2, 3)),
        ids & 255,
    )
    return *clamped, *remains, ids.sign(), (ids > 0).long(), x.to(torch.uint8).long()


def _computed(x, ids):
    a, b = torch.arange(6) - 2, x.argmax(-1, keepdim=True)
    sums = a + b, torch.add(a, b, alpha=3), a - b, 5 - a, torch.rsub(a, b, alpha=2)
    others = a * b, a**3, a.square(), a.abs(), -a, a // 2, torch.div(a, -2, rounding_mode="trunc")
    return (
        *sums,
        *others,
        torch.maximum(a, b),
        a.sum(),
        a.cumsum(0),
        (x > 0).sum(1),
        (x > 0).cumsum(1),
    )


def _moved(x, ids):
    a = torch.arange(6).repeat(4, 1)
    moved = a.view(-1), a.T, a[1:, ::2], a.flip(0), torch.roll(a, 2), a.unsqueeze(0), a.clone()
    joined = torch.cat([a, -a]), torch.stack([a, a * 2]), torch.where(x > 0, a, -1)
    parts = *a.split(2), *a.unbind(0), *a.chunk(2, 1)
    filled = a.masked_fill(x > 0, 77), a.gather(1, a % 3), a[torch.tensor([1, 1])]
    return *moved, *joined, *parts, *filled, a.amax(1), a.max(), a.to(torch.int32), a.bool().long()


def _combined(x, ids):
    a, b = torch.arange(6) - 2, x.argmax(-1)
    groups = torch.tensor([0, 1, 1, 0])
    bits = ~a, a | 9, a ^ b[0], b | 4, b ^ 4
    products = (a + 4).prod(), a.prod(), b.cumprod(0), (x > 0).long().prod(1), (b - 9).prod()
    written = (
        torch.zeros(3, dtype=torch.long).scatter(0, groups, b),
        torch.zeros(3, dtype=torch.long).scatter_add(0, groups, b),
        torch.zeros(3, dtype=torch.long).index_add(0, groups, b),
        torch.zeros(3, dtype=torch.long).index_put((groups,), b, accumulate=True),
        torch.zeros(4, dtype=torch.long).masked_scatter(b > 2, b + 7),
    )
    reduced = (
        torch.ones(3, dtype=torch.long).scatter_reduce(0, groups, b - 3, mode)
        for mode in ("sum", "prod", "amax", "amin", "mean")
    )
    return *bits, *products, *written, *reduced


_PROGRAMS = [_places, _made, _limited, _computed, _moved, _combined]


@pytest.mark.parametrize("decompose", [False, True], ids=["aten", "core"])
@pytest.mark.parametrize("function", _PROGRAMS, ids=lambda f: f.__name__)
def test_every_integer_of_a_program_lies_within_its_bounds(function, decompose: bool) -> None:
    program = torch.export.export(Function(function), (_X, _IDS))
    if decompose:
        program = program.run_decompositions()
    computed: dict[str, Any] = {}

    class Recorded(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            computed[n.name] = super().run_node(n)
            return computed[n.name]

    state = {**program.state_dict, **program.constants}
    targets = [spec.target for spec in program.graph_signature.input_specs]
    Recorded(program.graph_module).run(*(state[t] for t in targets if t is not None), _X, _IDS)
    ranges = WideIntegers().ranges(program, {})
    for node, bounds in ranges.items():
        result = computed[node.name]
        if isinstance(result, torch.Tensor) and not result.is_floating_point():
            extent = [int(limit) for limit in torch.aminmax(result)]
            assert all(map(bounds.contains, extent)), (node, bounds, extent)
    unknown = [n for n in program.graph.output_node().all_input_nodes if not ranges[n].is_known]
    assert not decompose or not unknown


def test_sizes_have_the_bounds_of_their_dimensions() -> None:
    def function(x):
        places = torch.arange(x.shape[0])
        return places * 3, (x > 0).sum(), x.argmax()

    for most, known in ((100, True), (None, False)):
        sizes = Dim("n", max=most) if most else Dim("n")
        program = torch.export.export(
            Function(function), (_X,), dynamic_shapes={"inputs": ({0: sizes},)}
        )
        ranges = WideIntegers().ranges(program, {})
        outputs = program.graph.output_node().all_input_nodes
        assert [ranges[node].is_known for node in outputs] == [known] * 3
        if known:
            assert [ranges[n] for n in outputs] == [
                Interval(0, 297),
                Interval(0, 600),
                Interval(0, 599),
            ]
