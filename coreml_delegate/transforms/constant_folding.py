"""Constant folding: PyTorch computes calls on constants that Core ML cannot compute.

A call is known if all its arguments are constants of the program or results of known calls. Known
calls are computed, once and in the dtypes of the program, if

- Core ML does not take them, whatever the op: resized tables, windows, linear algebra, fp64; or
- their value depends on the strides of a constant, which the program does not keep; or
- their result has to be a constant, as a convolution weight computed by ``weight_norm``.

Their known producers are folded too, and known users whose result is not larger than their folded
arguments. Other known calls stay in the graph, where coremltools may fold them.

Calls whose sizes depend on the values of constants (``nonzero``, a mask as an index) are computed
before, whatever Core ML takes: the sizes of the program are then those of the values.

Random numbers, states, dynamic sizes and quantized values are not folded: Core ML stores quantized
values, and dequantizes them itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tag
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.fx.node import map_arg

from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import GETITEM, OpCall, flatten, target_name
from coreml_delegate.ops.constants import NO_INPUTS, NOT_FOLDED, Inputs, known_values, note_fold
from coreml_delegate.ops.constraints import IsConstant
from coreml_delegate.ops.edits import (
    add_constant,
    become,
    insert,
    remove_unused,
    set_arguments,
)
from coreml_delegate.ops.flops import bytes_of, tensors_of
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.patches.torch import (
    FakeTensor,
    OpOverload,
    is_traceable_wrapper_subclass,
    schema_of,
)
from coreml_delegate.transforms.executorch_gaps import reads_other_memory

_logger = logging.getLogger(__name__)

_ATEN: Any = torch.ops.aten
_PREFIX = "coreml_delegate_folded"
_NOTED_GROWTH = 10**6
_MAX_GROWTH = 10**8
"""Bytes by which one folded value enlarges a program: logged and refused limit."""

_LARGER = "%s depends only on constants: its value makes the program %.1f MB larger"

_QUANTIZED = frozenset({"coreml_delegate", "quant", "quantized", "quantized_decomposed", "torchao"})
_CHECKS = frozenset({"aten._assert_tensor_metadata.default"})
_BAGS = frozenset({_ATEN.embedding_bag.default, _ATEN.embedding_bag.padding_idx})
_FRESH = frozenset({"aten.detach_.default", "aten.lift_fresh_copy.default"})
"""Operators that ``torch.export`` applies to a literal."""

RefusedCalls = Callable[[Sequence[Node], ExportedProgram], Collection[Node]]
"""Returns the known calls that Core ML does not take, judged one by one."""


def fold_constants(
    program: ExportedProgram, refused: RefusedCalls, inputs: Inputs = NO_INPUTS
) -> ExportedProgram:
    """Return ``program`` with known calls folded that Core ML cannot compute.

    Args:
        program: In ATen dialect, with its real state; it is not changed.
        refused: See ``RefusedCalls``.
        inputs: The constant inputs, if the program is a branch.
    """
    known_nodes = _known_calls(program, inputs)
    if not any(map(_is_mutable, known_nodes)) and not _calls_to_fold(program, known_nodes, refused):
        return program
    functional = program.run_decompositions({})
    known_nodes = _known_calls(functional, inputs)
    needed_nodes = _calls_to_fold(functional, known_nodes, refused)
    if not needed_nodes:
        return program
    fold = _Fold.of(_known_tensors(functional, inputs), known_nodes, needed_nodes)
    if not fold.results and not fold.unfolded:
        return program
    _apply(functional, fold)
    return functional


# Sizes that depend on values


def compute_sizes(program: ExportedProgram, inputs: Inputs = NO_INPUTS) -> ExportedProgram:
    """Return ``program`` with sizes computed that depend on the values of constants.

    Args:
        program: In ATen dialect, with its real state; it is not changed.
        inputs: The constant inputs, if the program is a branch.
    """
    known_nodes = set(_known_tensors(program, inputs)).union(_known_calls(program, inputs))
    if not any(
        _has_sizes_of_values(node) and not known_nodes.isdisjoint(node.all_input_nodes)
        for node in program.graph.nodes
    ):
        return program
    functional = program.run_decompositions(dict(_TO_INDEXING))
    results = dict(_values_with_own_sizes(functional, _evaluator(functional, inputs)))
    if not results:
        return program
    sources = {source for node in results for source in node.all_input_nodes}
    for node, value in results.items():
        node.meta["val"] = value
        _note_growth(_store(functional, node, value, list(node.users)), node, value.nbytes)
    functional.graph.eliminate_dead_code()
    remove_unused(functional, sources)
    # Traced again, the calls that depend on them have their sizes.
    return compute_sizes(functional.run_decompositions({}), inputs)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape)[mask.expand(shape)]


def _repeat_interleave(
    x: torch.Tensor, repeats: torch.Tensor, dim: int | None = None, output_size: int | None = None
) -> torch.Tensor:
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    repeats = repeats.expand(x.shape[dim])
    indices = _ATEN.repeat_interleave.Tensor(repeats, output_size=output_size)
    return x.index_select(dim, indices)


_TO_INDEXING: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _ATEN.masked_select.default: _masked_select,
        _ATEN.repeat_interleave.self_Tensor: _repeat_interleave,
    }
)


def _has_sizes_of_values(node: Node) -> bool:
    sizes = [size for tensor in tensors_of(node.meta.get("val")) for size in tensor.shape]
    dynamic = [size for size in sizes if not isinstance(size, int)]
    return any(free_unbacked_symbols(size) or not free_symbols(size) for size in dynamic)


def _values_with_own_sizes(
    program: ExportedProgram, value_of: Callable[[Node], Any]
) -> Iterator[tuple[Node, torch.Tensor]]:
    """Yield known calls and masks whose values determine sizes, with their values."""
    for node in list(program.graph.nodes):
        if not _has_sizes_of_values(node):
            continue
        if node.target is _ATEN.index.Tensor:
            for mask in filter(_is_mask, _indices(node)):
                if (value := value_of(mask)) is not None:
                    yield from _positions(node, mask, value).items()
        elif isinstance(value := value_of(node), torch.Tensor):
            yield node, value


def _indices(node: Node) -> list[Any]:
    return list(OpCall.of(node).arguments["indices"])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Node) and index.meta["val"].dtype is torch.bool


def _positions(node: Node, mask: Node, value: torch.Tensor) -> dict[Node, torch.Tensor]:
    """Index by positions in place of a mask; return the calls that stand for them, with values."""
    positions = dict[Node, torch.Tensor]()
    for position in value.nonzero().unbind(1):
        with node.graph.inserting_before(node):
            call = node.graph.call_function(_ATEN.clone.default, (mask,))
        call.meta = {**mask.meta, "val": position}
        positions[call] = position
    indices = _indices(node)
    at = indices.index(mask)
    set_arguments(node, indices=[*indices[:at], *positions, *indices[at + 1 :]])
    return positions


def _evaluator(program: ExportedProgram, inputs: Inputs) -> Callable[[Node], Any]:
    """Return a function that computes a node that depends only on constants; None for others."""
    values = _known_tensors(program, inputs)
    known_nodes = set(values)
    for node in program.graph.nodes:
        if _is_deterministic(node) and known_nodes.issuperset(node.all_input_nodes):
            known_nodes.add(node)

    def value_of(node: Node) -> Any:
        if node in values or node not in known_nodes:
            return values.get(node)
        sources = {source: value_of(source) for source in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), sources.__getitem__)
        target: Any = node.target
        try:
            with torch.no_grad():
                values[node] = target(*args, **kwargs)
        except Exception:  # noqa: BLE001 - any kernel may fail, with any error; the call stays
            values[node] = None
        return values[node]

    return value_of


# Embedding bags


def express_equal_bags(program: ExportedProgram, inputs: Inputs = NO_INPUTS) -> ExportedProgram:
    """Return ``program`` with constant offsets of embedding bags as ranges, if bags are equal.

    Core ML takes bags of equally many elements, which a range shows; see ``ops.indexing``.

    Args:
        program: In ATen dialect, with its real state; it is not changed.
        inputs: The constant inputs, if the program is a branch.
    """
    known_nodes = {*_known_tensors(program, inputs), *_known_calls(program, inputs)}
    if known_nodes.isdisjoint(map(_offsets, program.graph.nodes)):
        return program
    functional = program.run_decompositions({})
    value_of = _evaluator(functional, inputs)
    lengths = {
        node: length
        for node in functional.graph.nodes
        if (offsets := _offsets(node)) and (length := _bag_length(node, value_of(offsets)))
    }
    for node, length in lengths.items():
        count = OpCall.of(node).arguments["indices"].meta["val"].shape[0]
        offsets = insert(node, _ATEN.arange.start_step, 0, count, length)
        set_arguments(node, offsets=offsets, include_last_offset=False)
    functional.graph.eliminate_dead_code()
    functional.graph_module.recompile()
    return functional if lengths else program


def _offsets(node: Node) -> Any:
    """Return the offsets of an embedding bag; None if they are a range, and for other calls."""
    if node.target not in _BAGS:
        return None
    offsets = OpCall.of(node).arguments["offsets"]
    return None if offsets.target is _ATEN.arange.start_step else offsets


def _bag_length(node: Node, offsets: torch.Tensor | None) -> int:
    """Return the number of elements of each bag, 0 if it differs or is not known."""
    if offsets is None:
        return 0
    arguments = OpCall.of(node).arguments
    count = arguments["indices"].meta["val"].shape[0]
    bounds = offsets.tolist()
    if not arguments["include_last_offset"]:
        bounds.append(count)
    length = bounds[1] if len(bounds) > 1 else 0
    is_whole = isinstance(count, int) and length > 0
    return length if is_whole and bounds == list(range(0, count + 1, length)) else 0


# Known calls


def _known_calls(program: ExportedProgram, inputs: Inputs) -> list[Node]:
    """Return the calls that depend only on constants with values, in graph order."""
    known_nodes, unpacking = set(_known_tensors(program, inputs)), _unpacking_calls(program)
    calls: list[Node] = []
    for node in program.graph.nodes:
        if node in unpacking or not _is_computable(node):
            continue
        if known_nodes.issuperset(node.all_input_nodes):
            known_nodes.add(node)
            calls.append(node)
    return calls


def _unpacking_calls(program: ExportedProgram) -> set[Node]:
    """Return the calls that unpack or widen the integers of compressed weights."""
    unpacking: set[Node] = set()
    for node in reversed(program.graph.nodes):
        results = list(tensors_of(node.meta.get("val"))) if node.op == "call_function" else []
        are_integers = results and not any(tensor.is_floating_point() for tensor in results)
        if are_integers and any(user in unpacking or _is_quantized(user) for user in node.users):
            unpacking.add(node)
    return unpacking


def _is_quantized(node: Node) -> bool:
    return target_name(node.target).partition(".")[0] in _QUANTIZED


def _known_tensors(program: ExportedProgram, inputs: Inputs) -> dict[Node, Any]:
    return {
        node: value
        for node, value in known_values(program, inputs).items()
        if value is not None
        and not isinstance(value, FakeTensor)
        and not is_traceable_wrapper_subclass(value)
    }


def _is_computable(node: Node) -> bool:
    """Return whether a call is deterministic, and its result may be stored."""
    results = list(tensors_of(node.meta.get("val")))
    sizes = [size for tensor in results for size in tensor.shape]
    if not results or not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    return _is_deterministic(node)


def _is_deterministic(node: Node) -> bool:
    if node.op != "call_function":
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
        and schema_of(target).is_mutable
        and target_name(target) not in _FRESH
    )


# Calls to fold


def _calls_to_fold(
    program: ExportedProgram, calls: Sequence[Node], refused: RefusedCalls
) -> Collection[Node]:
    """Return the known calls that Core ML cannot compute, or that have to be constants."""
    if not calls:
        return ()
    checked = [node for node in calls if target_name(node.target) not in _FRESH | {GETITEM}]
    call_set = set(calls)
    must_be_constant = {
        argument for node in program.graph.nodes for argument in _constant_arguments(node)
    }
    must_be_constant.update(filter(reads_other_memory, calls))
    wide = WideIntegers().obstacles(program)
    return {*refused(checked, program), *(must_be_constant & call_set), *(wide.keys() & call_set)}


def _constant_arguments(node: Node) -> Iterator[Node]:
    """Yield the arguments of a call that have to be constants."""
    rule = record_of(target_name(node.target)) if node.op == "call_function" else None
    names = [c.name for c in rule.constraints if isinstance(c, IsConstant)] if rule else []
    arguments = OpCall.of(node).arguments if names else {}
    for argument in flatten([arguments.get(name) for name in names]):
        if isinstance(argument, Node):
            yield argument


# Folding


@dataclass(slots=True)
class _Fold:
    """The folded calls of a program.

    Attributes:
        calls: All folded calls.
        results: The values of the calls with users outside, or that are outputs.
        growths: Growth of the program by each result, in bytes.
        unfolded: Calls that are not folded though Core ML cannot compute them, and why.
    """

    calls: Collection[Node] = ()
    results: Mapping[Node, torch.Tensor] = field(default_factory=dict)
    growths: Mapping[Node, int] = field(default_factory=dict)
    unfolded: dict[Node, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, values: Mapping[Node, Any], calls: Sequence[Node], needed_nodes: Collection[Node]
    ) -> _Fold:
        """Return the largest fold of computable values below the growth limit."""
        fold = cls()
        while True:
            fold._choose(calls, needed_nodes)
            too_large = {n: growth for n, growth in fold.growths.items() if growth > _MAX_GROWTH}
            if not too_large and fold._compute(dict(values)):
                return fold
            for node, growth in too_large.items():
                fold.unfolded[node] = (
                    f"it depends only on constants, but would make the program "
                    f"{growth / 1e6:.1f} MB larger, at most {_MAX_GROWTH // 10**6} MB are folded"
                )

    def _choose(self, calls: Sequence[Node], needed_nodes: Collection[Node]) -> None:
        unfoldable: set[Node] = set()  # unfolded calls, and calls that depend on them
        for node in calls:
            if node in self.unfolded or not unfoldable.isdisjoint(node.all_input_nodes):
                unfoldable.add(node)
        foldable = dict.fromkeys(node for node in calls if node not in unfoldable)
        folded = {node for node in foldable if node in needed_nodes}
        for node in reversed(foldable):
            if node in folded:
                folded.update(source for source in node.all_input_nodes if source in foldable)
        for node in foldable:
            sources = folded.intersection(node.all_input_nodes)
            if sources and bytes_of(node) <= sum(map(bytes_of, sources)):
                folded |= _dependencies(node, foldable)
        self.calls = {node: None for node in foldable if node in folded}.keys()
        self.growths = dict(self._growths())

    def _growths(self) -> Iterator[tuple[Node, int]]:
        """Yield the calls with users outside the fold, and the bytes that their values add."""
        unused_constants = {
            source
            for call in self.calls
            for source in call.all_input_nodes
            if source.op == "placeholder" and all(map(self._is_inside, source.users))
        }
        for node in self.calls:
            if not all(map(self._is_inside, node.users)):
                folded_constants = {
                    n for call in _dependencies(node, self.calls) for n in call.all_input_nodes
                }
                folded_constants &= unused_constants
                unused_constants -= folded_constants
                yield node, bytes_of(node) - sum(map(bytes_of, folded_constants))

    def _is_inside(self, user: Node) -> bool:
        return user in self.calls or _is_check(user)

    def _compute(self, values: dict[Node, Any]) -> bool:
        """Compute the results; return whether PyTorch succeeded."""
        for node in self.calls:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            try:
                with torch.no_grad():
                    values[node] = target(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - any kernel may fail, with any error
                text = str(error).partition("\n")[0]
                self.unfolded[node] = f"it depends only on constants, but PyTorch fails: {text}"
                return False
            if target_name(target).startswith(("aten.empty", "aten.new_empty")):
                values[node].zero_()  # equal programs give equal bytes
        self.results = {node: values[node] for node in self.growths}
        return True


def _is_check(user: Node) -> bool:
    return target_name(user.target) in _CHECKS


def _dependencies(node: Node, among: Collection[Node]) -> set[Node]:
    """Return a call and its dependencies in ``among``."""
    sources, pending = {node}, [node]
    while pending:
        new = {n for n in pending.pop().all_input_nodes if n in among} - sources
        sources |= new
        pending += new
    return sources


def _apply(program: ExportedProgram, fold: _Fold) -> None:
    """Replace results by constants, and remove unused nodes and constants."""
    sources = {source for call in fold.calls for source in call.all_input_nodes}
    for node, text in fold.unfolded.items():
        node.meta["custom"] = {**(node.meta.get("custom") or {}), NOT_FOLDED: text}
        _logger.info("%s is not folded: %s", node.name, text)
    for node, value in fold.results.items():
        users = [user for user in node.users if user not in fold.calls and not _is_check(user)]
        constant = _store(program, node, value, users)
        _note_growth(constant, node, fold.growths[node])
    for node in fold.calls:
        for check in [user for user in node.users if _is_check(user)]:
            program.graph.erase_node(check)
    program.graph.eliminate_dead_code()
    remove_unused(program, sources)
    program.graph_module.recompile()


def _store(
    program: ExportedProgram, node: Node, value: torch.Tensor, users: Collection[Node]
) -> Node:
    """Store the value of a call as a constant for ``users``, and return its placeholder."""
    name = _unused_name(program, f"{_PREFIX}_{node.name}")
    value = value.reshape(node.meta["val"].shape)
    constant = add_constant(program, name, value, node, dtype=value.dtype)
    for user in users:
        if user.op != "output":
            user.replace_input_with(node, constant)
    if any(user.op == "output" for user in users):  # the signature names outputs
        become(node, _ATEN.clone.default, constant)
    return constant


def _note_growth(constant: Node, call: Node, growth: int) -> None:
    if growth > _NOTED_GROWTH:
        note_fold(constant, growth)
        _logger.warning(_LARGER, call.name, growth / 1e6)


def _unused_name(program: ExportedProgram, name: str) -> str:
    while name in program.constants or name in program.state_dict:
        name += "_"
    return name
