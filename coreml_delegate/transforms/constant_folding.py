"""Constant folding: PyTorch computes what Core ML cannot, where it depends on constants alone.

A call is known if its arguments are: constants of the program, or results of known calls. Known
calls are computed, once and in the dtypes of the program, if

- Core ML does not take them, whatever the op: resized tables, windows, linear algebra, fp64; or
- their result has to be a constant, as the weight of a convolution that ``weight_norm`` makes.

So are the known calls that these depend on, and those behind whose result is not larger than the
folded values it is made of. All others stay calls, which coremltools folds as it sees fit.

Random numbers, states, dynamic sizes and quantized values are not folded: Core ML stores what is
quantized, and dequantizes it itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tag
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import GETITEM, OpCall, flatten, target_name
from coreml_delegate.ops.constants import NO_INPUTS, NOT_FOLDED, Inputs, known_values, note_fold
from coreml_delegate.ops.constraints import IsConstant
from coreml_delegate.ops.edits import add_constant, become
from coreml_delegate.ops.flops import bytes_of, tensors_of
from coreml_delegate.ops.integer_ranges import WideIntegers

_logger = logging.getLogger(__name__)

_PREFIX = "coreml_delegate_folded"
_NOTABLE = 10**6
_LARGEST = 10**8
"""Bytes by which one folded value may make a program larger: beyond the first it is told."""

_LARGER = "%s depends on constants alone: its value makes the program %.1f MB larger"

_QUANTIZED = frozenset({"coreml_delegate", "quant", "quantized", "quantized_decomposed", "torchao"})
_CHECKS = frozenset({"aten._assert_tensor_metadata.default"})
_FRESH = frozenset({"aten.detach_.default", "aten.lift_fresh_copy.default"})
"""Operators that ``torch.export`` puts behind a literal."""

RefusedCalls = Callable[[Sequence[Node], ExportedProgram], Collection[Node]]
"""Returns those of known calls that Core ML does not take, each by itself."""


def fold_constants(
    program: ExportedProgram, refused: RefusedCalls, inputs: Inputs = NO_INPUTS
) -> ExportedProgram:
    """Return ``program`` with known calls computed that Core ML cannot compute.

    Args:
        program: In ATen dialect, with its real state; it is not changed.
        refused: See ``RefusedCalls``.
        inputs: Those that are constants, of a branch.
    """
    known = _known_calls(program, inputs)
    if not any(map(_is_mutable, known)) and not _wanted(program, known, refused):
        return program
    functional = program.run_decompositions({})
    known = _known_calls(functional, inputs)
    wanted = _wanted(functional, known, refused)
    if not wanted:
        return program
    fold = _Fold.of(_values(functional, inputs), known, wanted)
    if not fold.results and not fold.left:
        return program
    _apply(functional, fold)
    return functional


# Known


def _known_calls(program: ExportedProgram, inputs: Inputs) -> list[Node]:
    """Return the calls that depend only on constants with known values, in graph order."""
    known, codes = set(_values(program, inputs)), _codes(program)
    calls: list[Node] = []
    for node in program.graph.nodes:
        if node in codes or not _is_computable(node):
            continue
        if known.issuperset(node.all_input_nodes):
            known.add(node)
            calls.append(node)
    return calls


def _codes(program: ExportedProgram) -> set[Node]:
    """Return the calls that unpack or widen the integers of compressed weights."""
    codes: set[Node] = set()
    for node in reversed(program.graph.nodes):
        results = list(tensors_of(node.meta.get("val"))) if node.op == "call_function" else []
        are_integers = results and not any(tensor.is_floating_point() for tensor in results)
        if are_integers and any(user in codes or _is_quantized(user) for user in node.users):
            codes.add(node)
    return codes


def _is_quantized(node: Node) -> bool:
    return target_name(node.target).partition(".")[0] in _QUANTIZED


def _values(program: ExportedProgram, inputs: Inputs) -> dict[Node, Any]:
    return {
        node: value
        for node, value in known_values(program, inputs).items()
        if value is not None
        and not isinstance(value, FakeTensor)
        and not is_traceable_wrapper_subclass(value)
    }


def _is_computable(node: Node) -> bool:
    """Return whether the result of a call follows from its arguments, and may be stored."""
    if node.op != "call_function":
        return False
    results = list(tensors_of(node.meta.get("val")))
    sizes = [size for tensor in results for size in tensor.shape]
    if not results or not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    if target_name(node.target) == GETITEM:
        return True
    target = node.target
    return (
        isinstance(target, OpOverload) and not _is_quantized(node) and not _is_random(node, target)
    )


def _is_random(node: Node, target: OpOverload) -> bool:
    if Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = OpCall.of(node).arguments
    return arguments.get("train") is not False and arguments.get("dropout_p") != 0


def _is_mutable(node: Node) -> bool:
    target: Any = node.target
    return (
        isinstance(node.target, OpOverload)
        and target._schema.is_mutable
        and target_name(target) not in _FRESH
    )


# Wanted


def _wanted(
    program: ExportedProgram, known: Sequence[Node], refused: RefusedCalls
) -> Collection[Node]:
    """Return the known calls that Core ML cannot compute, or that have to be constants."""
    if not known:
        return ()
    judged = [node for node in known if target_name(node.target) not in _FRESH | {GETITEM}]
    among = set(known)
    demanded = {argument for node in program.graph.nodes for argument in _demanded(node)}
    wide = WideIntegers().obstacles(program)
    return {*refused(judged, program), *(demanded & among), *(wide.keys() & among)}


def _demanded(node: Node) -> Iterator[Node]:
    """Yield the arguments of a call that have to be constants."""
    rule = record_of(target_name(node.target)) if node.op == "call_function" else None
    names = [c.name for c in rule.constraints if isinstance(c, IsConstant)] if rule else []
    arguments = OpCall.of(node).arguments if names else {}
    for argument in flatten([arguments.get(name) for name in names]):
        if isinstance(argument, Node):
            yield argument


# Folded


@dataclass(slots=True)
class _Fold:
    """The calls that one folding computes.

    Attributes:
        calls: All of them.
        results: The value of each call that something else uses, or an output is.
        growths: By how many bytes each result makes the program larger.
        left: The calls that are not folded though Core ML cannot compute them, and why.
    """

    calls: Collection[Node] = ()
    results: Mapping[Node, torch.Tensor] = field(default_factory=dict)
    growths: Mapping[Node, int] = field(default_factory=dict)
    left: dict[Node, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, values: Mapping[Node, Any], known: Sequence[Node], wanted: Collection[Node]
    ) -> _Fold:
        """Return the largest fold whose values can be computed, and are not too large."""
        fold = cls()
        while True:
            fold._choose(known, wanted)
            too_large = {n: grown for n, grown in fold.growths.items() if grown > _LARGEST}
            if not too_large and fold._compute(dict(values)):
                return fold
            for node, grown in too_large.items():
                fold.left[node] = (
                    f"it depends on constants alone, but would make the program "
                    f"{grown / 1e6:.1f} MB larger, and at most {_LARGEST // 10**6} MB are folded"
                )

    def _choose(self, known: Sequence[Node], wanted: Collection[Node]) -> None:
        left: set[Node] = set()  # calls that are left, and what depends on them
        for node in known:
            if node in self.left or not left.isdisjoint(node.all_input_nodes):
                left.add(node)
        possible = dict.fromkeys(node for node in known if node not in left)
        chosen = {node for node in possible if node in wanted}
        for node in reversed(possible):
            if node in chosen:
                chosen.update(source for source in node.all_input_nodes if source in possible)
        for node in possible:
            sources = chosen.intersection(node.all_input_nodes)
            if sources and bytes_of(node) <= sum(map(bytes_of, sources)):
                chosen |= _sources(node, possible)
        self.calls = {node: None for node in possible if node in chosen}.keys()
        self.growths = dict(self._growths())

    def _growths(self) -> Iterator[tuple[Node, int]]:
        """Yield the calls with users outside, each with the bytes that its value adds."""
        freed = {
            source
            for call in self.calls
            for source in call.all_input_nodes
            if source.op == "placeholder" and all(map(self._is_inside, source.users))
        }
        for node in self.calls:
            if not all(map(self._is_inside, node.users)):
                replaced = {n for call in _sources(node, self.calls) for n in call.all_input_nodes}
                replaced &= freed
                freed -= replaced
                yield node, bytes_of(node) - sum(map(bytes_of, replaced))

    def _is_inside(self, user: Node) -> bool:
        return user in self.calls or _is_check(user)

    def _compute(self, values: dict[Node, Any]) -> bool:
        """Compute the results; return whether PyTorch could."""
        for node in self.calls:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            try:
                with torch.no_grad():
                    values[node] = target(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - any kernel may fail, with any error
                text = str(error).partition("\n")[0]
                self.left[node] = f"it depends on constants alone, but PyTorch fails: {text}"
                return False
            if target_name(target).startswith(("aten.empty", "aten.new_empty")):
                values[node].zero_()  # equal programs give equal bytes
        self.results = {node: values[node] for node in self.growths}
        return True


def _is_check(user: Node) -> bool:
    return target_name(user.target) in _CHECKS


def _sources(node: Node, among: Collection[Node]) -> set[Node]:
    """Return a call and the calls of ``among`` that it depends on."""
    sources, pending = {node}, [node]
    while pending:
        new = {n for n in pending.pop().all_input_nodes if n in among} - sources
        sources |= new
        pending += new
    return sources


def _apply(program: ExportedProgram, fold: _Fold) -> None:
    """Put constants in place of the results, and remove what nothing else uses."""
    sources = {source for call in fold.calls for source in call.all_input_nodes}
    for node, text in fold.left.items():
        node.meta["custom"] = {**(node.meta.get("custom") or {}), NOT_FOLDED: text}
        _logger.info("%s is not folded: %s", node.name, text)
    for node, value in fold.results.items():
        name = _unused_name(program, f"{_PREFIX}_{node.name}")
        constant = add_constant(program, name, value, node, dtype=value.dtype)
        users = [user for user in node.users if user not in fold.calls and not _is_check(user)]
        for user in users:
            if user.op != "output":
                user.replace_input_with(node, constant)
        if any(user.op == "output" for user in users):  # which the signature names
            become(node, torch.ops.aten.clone.default, constant)
        if fold.growths[node] > _NOTABLE:
            note_fold(constant, fold.growths[node])
            _logger.warning(_LARGER, node.name, fold.growths[node] / 1e6)
    for node in fold.calls:
        for check in [user for user in node.users if _is_check(user)]:
            program.graph.erase_node(check)
    program.graph.eliminate_dead_code()
    _remove_unused(program, sources)
    program.graph_module.recompile()


def _unused_name(program: ExportedProgram, name: str) -> str:
    while name in program.constants or name in program.state_dict:
        name += "_"
    return name


def _remove_unused(program: ExportedProgram, sources: Collection[Node]) -> None:
    """Remove those parameters, buffers and literals among ``sources`` that have no users left."""
    specs = program.graph_signature.input_specs
    state: dict[str, Any] = program.state_dict
    unused = {node.name: node for node in sources if node.op == "placeholder" and not node.users}
    for name in program.graph_signature.user_inputs:
        unused.pop(str(name), None)
    for spec in [spec for spec in specs if spec.arg.name in unused]:
        specs.remove(spec)
        program.graph.erase_node(unused[spec.arg.name])
        state.pop(str(spec.target), None)
        program.constants.pop(str(spec.target), None)
