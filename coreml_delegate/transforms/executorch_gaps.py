"""Rewrites of programs that ExecuTorch could not write to a ``.pte``, or could not lower.

Each takes a program in ATen dialect, which it does not change.

**Containers.** ExecuTorch writes the nesting of inputs and results into a ``.pte``, with the names
under which container classes are registered with torch. Named tuples have no such name. The names
of parameters, and of members of named tuples and dataclasses, are written if the containers are
dicts. Programs get the names of their inputs and outputs from there; see ``value_names``.

**Texts.** ExecuTorch writes None for a text input, and cannot write a program that returns text.

**Empty tensors in concatenations.** Torch skips tensors of shape [0], whatever the rank of the
other tensors; caches of transformers begin with an empty tensor. ExecuTorch's runtime does not load
a program in which it is a constant. Writing to an empty slice has no effect.

**Ops without a kernel.** ExecuTorch's runtime does not load a program that calls them, and cannot
lower an op without an out variant. Some, of torch and other packages, equal functions of torch.

**Uninitialized tensors.** ExecuTorch fixes their sizes to those of the example inputs, and has no
kernel for what ``empty_like`` becomes. Their values are arbitrary, so they become zeros.

**Copies of inputs.** ExecuTorch does not write an input, or another buffer, back to a buffer unless
an op computes it.

**Assertions.** They have no result and are never run: ExecuTorch removes most of them, but only
after it has refused or kept the operations that only they use.

**Checks in linear algebra.** ExecuTorch has no op for the check that a matrix could be inverted or
factored.

**Strides.** ``as_strided`` indexes the memory of its argument, which in PyTorch is the memory of
the tensor that a transpose, slice or expansion is a view of. In ExecuTorch and Core ML every result
has memory of its own, in row-major order. ``fill_diagonal_`` becomes ``as_strided``.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg

from coreml_delegate.exported.containers import keys_of
from coreml_delegate.ops.boundary import is_row_major
from coreml_delegate.ops.edits import (
    all_nodes,
    arguments_of,
    decompose,
    insert,
    set_arguments,
    value_of,
)
from coreml_delegate.ops.sizes import is_size
from coreml_delegate.patches.torch import OpOverload, pytree, schema_of, share_memory, with_parts

_logger = logging.getLogger(__name__)

_BUILTIN_CONTAINERS = frozenset({tuple, list, dict, OrderedDict, defaultdict, deque})
_ATEN: Any = torch.ops.aten
ASSERTIONS = frozenset(
    {
        _ATEN._assert_async.default,
        _ATEN._assert_async.msg,
        _ATEN._assert_scalar.default,
        _ATEN._assert_tensor_metadata.default,
        _ATEN.sym_constrain_range.default,
        _ATEN.sym_constrain_range_for_size.default,
    }
)


_COPIES = frozenset({_ATEN.copy_.default, _ATEN.copy.default})


def name_values(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with the names of its inputs and outputs, for ExecuTorch to write.

    Positional inputs become keyword inputs with the names of their parameters. Containers with
    named members become dicts, other unregistered containers tuples.
    """
    entries = [_with_names(entry) for entry in program.module_call_graph]
    if entries == list(program.module_call_graph):
        return program
    named: Any = with_parts(program, module_call_graph=entries)
    if program.example_inputs is not None:
        inputs = pytree.tree_leaves(program.example_inputs)
        named.example_inputs = pytree.tree_unflatten(inputs, named.call_spec.in_spec)
    return named


def _with_names(entry: Any) -> Any:
    signature = entry.signature
    if signature is None:
        return entry
    inputs, outputs = map(_plain_spec, (signature.in_spec, signature.out_spec))
    parameters = signature.forward_arg_names
    named = _by_keyword(inputs, parameters) if parameters else inputs
    return replace(entry, signature=replace(signature, in_spec=named, out_spec=outputs))


def _plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Return a nesting of tuples, lists, dicts and classes registered with torch."""
    if spec.is_leaf():
        return spec
    children = [_plain_spec(child) for child in spec.children()]
    keys = None if spec.type in _BUILTIN_CONTAINERS else keys_of(spec)
    if keys is not None:
        return pytree.treespec_dict(zip(keys, children, strict=True))
    if _has_name(spec):
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.treespec_tuple(children)


def _by_keyword(spec: pytree.TreeSpec, parameters: Sequence[str]) -> pytree.TreeSpec:
    """Return the nesting of inputs with all positional inputs as keyword inputs."""
    positional, keyword = spec.children()
    names = [*parameters[: positional.num_children], *keyword.context]
    children = [*positional.children(), *keyword.children()]
    if len(set(names)) != len(children):
        return spec
    by_name = pytree.treespec_dict(zip(names, children, strict=True))
    return pytree.treespec_tuple([pytree.treespec_tuple(), by_name])


def _has_name(spec: pytree.TreeSpec) -> bool:
    leaves: list[pytree.TreeSpec] = [pytree.treespec_leaf()] * spec.num_children
    try:
        pytree.treespec_dumps(pytree.TreeSpec(spec.type, spec.context, leaves))
    except (NotImplementedError, TypeError):  # no registered name, or keys that JSON lacks
        return False
    return True


def drop_text_results(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with None in place of returned texts."""
    specs = program.graph_signature.output_specs
    texts = {
        n: spec.arg.value
        for n, spec in enumerate(specs)
        if isinstance(spec.arg, ConstantArgument) and isinstance(spec.arg.value, str)
    }
    if not texts:
        return program
    _logger.warning(
        "the model returns text (%s), which a .pte cannot; it returns None instead",
        ", ".join(map(repr, texts.values())),
    )
    module = copy.deepcopy(program.graph_module)
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(None if n in texts else item for n, item in enumerate(results)),)
    module.recompile()
    signature = replace(
        program.graph_signature,
        output_specs=[
            replace(spec, arg=ConstantArgument(spec.arg.name, None)) if n in texts else spec
            for n, spec in enumerate(specs)
        ],
    )
    return with_parts(program, graph_module=module, graph_signature=signature)


def drop_empty_parts(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` without empty tensors in concatenations and without writes to them."""
    table: dict[Any, Callable[..., Any]] = {}
    for node in program.graph.nodes:
        if node.target is _ATEN.cat.default and any(_is_empty(value_of(n)) for n in node.args[0]):
            table[node.target] = _without_empty
        elif node.target in _COPIES and _has_no_elements(value_of(node)):
            table[_ATEN.slice_scatter.default] = _without_write  # what a write to a slice becomes
    return program.run_decompositions(table) if table else program


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the static shape [0]; a check of a dynamic size would specialize it."""
    return tensor.dim() == 1 and _has_no_elements(tensor)


def _has_no_elements(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in tensor.shape)


def _without_write(x: torch.Tensor, source: torch.Tensor, *_: Any) -> Any:
    return x.clone() if _has_no_elements(source) else NotImplemented


def _without_empty(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    parts = [tensor for tensor in tensors if not _is_empty(tensor)]
    if len(parts) in (0, len(tensors)):
        return NotImplemented
    # Empty tensors contribute to the dtype of the result.
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    joined = torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()
    return joined.to(dtype)


def copy_written_inputs(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with clones of inputs and buffers before they are copied in place."""
    if not any(map(_copies_input, program.graph.nodes)):
        return program
    edited = with_parts(program, graph_module=copy.deepcopy(program.graph_module))
    for node in filter(_copies_input, edited.graph.nodes):
        source = node.all_input_nodes[1]
        node.replace_input_with(source, insert(node, _ATEN.clone.default, source))
    edited.graph_module.recompile()
    return edited


def _copies_input(node: Node) -> bool:
    if node.target is not _ATEN.copy_.default or len(node.all_input_nodes) < 2:
        return False
    are_inputs = all(source.op == "placeholder" for source in node.all_input_nodes)
    return are_inputs and not _is_written(node.all_input_nodes[1])


def _is_written(tensor: Node) -> bool:
    """Whether a call writes to a tensor in place, or to a view of it."""
    for user in tensor.users:
        if not isinstance(user.target, OpOverload) or user.args[0] is not tensor:
            continue
        schema = schema_of(user.target)
        is_view = any(result.alias_info is not None for result in schema.returns)
        if schema.is_mutable or (is_view and _is_written(user)):
            return True
    return False


def drop_assertions(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` without assertions and nodes that only they use, branches included.

    Assertions on numbers that sizes depend on stay: torch derives bounds of sizes from them.
    """
    if not any(_unused_assertions(graph) for graph in _graphs(program.graph_module)):
        return program
    edited = with_parts(program, graph_module=copy.deepcopy(program.graph_module))
    for graph in _graphs(edited.graph_module):
        for node in _unused_assertions(graph):
            graph.erase_node(node)
        graph.owning_module.recompile()
    return edited


def _graphs(root: GraphModule) -> list[Any]:
    return [module.graph for module in root.modules() if isinstance(module, GraphModule)]


def _unused_assertions(graph: Graph) -> list[Node]:
    """Return droppable assertions and the nodes that only they use, last node first."""
    assertions = [node for node in graph.nodes if node.target in ASSERTIONS]
    if not assertions:
        return []
    used = _ancestors(
        node
        for node in graph.nodes
        if node.op == "placeholder" or not (node.users or node.target in ASSERTIONS)
    )
    checked = {a: _symbols(filter(is_size, a.all_input_nodes)) for a in assertions}
    undecided = {a for a in assertions if checked[a]}
    while undecided:
        symbols = _symbols(used)
        bounding = {a for a in undecided if checked[a] & symbols}
        if not bounding:
            break
        used |= _ancestors(bounding)
        undecided -= bounding
    return [node for node in reversed(graph.nodes) if node not in used]


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all their transitive inputs."""
    pending, ancestors = list(nodes), set[Node]()
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors


def _symbols(nodes: Iterable[Node]) -> set[Any]:
    values: list[Any] = [node.meta.get("val") for node in nodes]
    return set[Any]().union(*map(free_symbols, values))


def _index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if not x.dim():
        return NotImplemented
    aligned = index.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    index = aligned.expand(source.shape)
    return x.scatter_reduce(dim, index, source, reduce, include_self=include_self)


def _zeros(size: Sequence[int], *, memory_format: Any = None, **options: Any) -> torch.Tensor:
    zeros = torch.zeros(size, **options)
    return zeros if memory_format is None else zeros.contiguous(memory_format=memory_format)


def _histogram(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """``sum_i [b = floor((x_i - min) bins / (max - min))]``; the last bin includes ``max``.

    Equal bounds stand for the bounds of the data.
    """
    x = x.flatten()
    if min == max and _has_no_elements(x):
        return NotImplemented
    low, high = (min, max) if min != max else _bounds(x)
    numbers = ((x - low) * bins / (high - low)).to(torch.int32).clamp(max=bins - 1)
    numbers = torch.where((x >= low) & (x <= high), numbers, -1)
    return (numbers[:, None] == torch.arange(bins)).sum(0).to(x.dtype)


def _bounds(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value; around a single value, one less and one more."""
    low, high = x.amin(), x.amax()
    is_constant = (low == high).to(x.dtype)
    return low - is_constant, high + is_constant


def _grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> Any:
    """``y[s] = x[s] @ matrices[g]`` with the first group g that ends after row s, otherwise zeros.

    Args:
        x: Rows [S, K], sorted by group.
        matrices: One for each group, [G, K, N].
        ends: The row after the last row of each group, [G].
    """
    rows = torch.arange(x.shape[0])
    groups = (rows[:, None] >= ends).sum(-1).clamp(max=matrices.shape[0] - 1)
    products = torch.bmm(x[:, None], matrices[groups])[:, 0]
    return products.where((rows < ends[-1])[:, None], 0)


def _grouped_mm(
    x: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if x.dim() != 2 or matrices.dim() != 3 or ends is None or bias is not None:
        return NotImplemented
    return _grouped_product(x, matrices, ends).to(out_dtype or x.dtype)


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> Any:
    """``y[..., c] = [x = c]``, where torch also asserts that ``x`` is below ``num_classes``."""
    if num_classes == -1:  # as many as the data have
        return NotImplemented
    return (x[..., None] == torch.arange(num_classes)).to(torch.int64)


def _kth_value(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.dim():
        return NotImplemented
    chosen = (part.narrow(dim, k - 1, 1) for part in x.sort(dim))
    return tuple(part if keepdim else part.squeeze(dim) for part in chosen)


def _median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower of two medians, or the first NaN."""
    if not x.dim() or not isinstance(x.shape[dim], int) or not x.shape[dim]:
        return NotImplemented
    median, position = _kth_value(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        is_nan = x.isnan()
        has_nan = is_nan.any(dim, keepdim)
        median = median.masked_fill(has_nan, math.nan)
        position = torch.where(has_nan, is_nan.int().argmax(dim, keepdim), position)
    return median, position


def _median(x: torch.Tensor) -> Any:
    result = _median_along(x.flatten(), 0)
    return result if result is NotImplemented else result[0]


def _without_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the random function for calls whose generator is None."""

    def draw(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
        return NotImplemented if generator is not None else function(*args, **options)

    return draw


_EQUIVALENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        str(_ATEN._grouped_mm.default): _grouped_mm,
        str(_ATEN._is_all_true.default): torch.all,
        str(_ATEN._is_any_true.default): torch.any,
        str(_ATEN.empty.memory_format): _zeros,
        str(_ATEN.empty_like.default): torch.zeros_like,
        str(_ATEN.histc.default): _histogram,
        str(_ATEN.index_reduce.default): _index_reduce,
        str(_ATEN.kthvalue.default): _kth_value,
        str(_ATEN.median.default): _median,
        str(_ATEN.median.dim): _median_along,
        str(_ATEN.new_empty.default): torch.Tensor.new_zeros,
        str(_ATEN.one_hot.default): _one_hot,
        str(_ATEN.rand.generator): _without_generator(torch.rand),
        str(_ATEN.randn.generator): _without_generator(torch.randn),
        "coreml.sdpa.default": torch.nn.functional.scaled_dot_product_attention,
        "executorch.alias.default": lambda first, second: (first.clone(), second.clone()),
        "llama.fallback.default": torch.clone,
        "transformers.grouped_mm_fallback.default": _grouped_product,
    }
)


def decompose_without_kernel(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with ops that ExecuTorch does not run replaced by functions of torch."""
    targets = {node.target for node in all_nodes(program)}
    table: Any = {op: _EQUIVALENTS[str(op)] for op in targets if str(op) in _EQUIVALENTS}
    return program.run_decompositions(table) if table else program


def stride_over_bases(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with ``as_strided`` applied to the tensor that its argument views."""
    program = _fill_views_of_diagonals(program)
    for node in filter(_strides_over_unknown_sizes, program.graph.nodes):
        _logger.warning(
            "%s strides over the memory of a view whose sizes are known only when the program runs."
            " ExecuTorch has the view in row-major memory: the results may differ from PyTorch's",
            node.name,
        )
    if not any(map(reads_other_memory, program.graph.nodes)):
        return program
    functional = program.run_decompositions({})  # where no write to a view reaches its base
    for node in list(functional.graph.nodes):
        if reads_other_memory(node):
            _stride_over_base(node)
    functional.graph.eliminate_dead_code()
    functional.graph_module.recompile()
    return functional


def _fill_views_of_diagonals(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with ``diagonal().fill_()`` for ``fill_diagonal_`` of matrices."""
    if not any(map(_fills_diagonal, program.graph.nodes)):
        return program
    edited = with_parts(program, graph_module=copy.deepcopy(program.graph_module))
    for node in list(filter(_fills_diagonal, edited.graph.nodes)):
        matrix, value, *_ = node.args
        insert(node, _ATEN.fill_.Scalar, insert(node, _ATEN.diagonal.default, matrix), value)
        node.replace_all_uses_with(matrix)
        edited.graph.erase_node(node)
    edited.graph_module.recompile()
    return edited


def _fills_diagonal(node: Node) -> bool:
    """Whether a call fills the diagonal of a matrix, and does not go on below it."""
    if node.target is not _ATEN.fill_diagonal_.default:
        return False
    return value_of(node).dim() == 2 and not arguments_of(node)["wrap"]


def reads_other_memory(node: Node) -> bool:
    """Whether a call of ``as_strided`` reads other elements than it would of row-major memory."""
    if node.target not in _STRIDED:
        return False
    arguments = arguments_of(node)
    view, offset = value_of(arguments["self"]), arguments["storage_offset"]
    start = view.storage_offset()
    if not _are_static(view.shape, arguments["size"], arguments["stride"], (start, offset or 0)):
        return False
    if not view.is_contiguous() or (offset is not None and start):
        return True
    steps = zip(arguments["size"], arguments["stride"], strict=True)
    return (offset or 0) + sum((size - 1) * stride for size, stride in steps) >= view.numel()


def _strides_over_unknown_sizes(node: Node) -> bool:
    if node.target not in _STRIDED:
        return False
    view = value_of(arguments_of(node)["self"])
    return not (_are_static(view.shape) or is_row_major(view))


def _stride_over_base(node: Node) -> None:
    """Apply ``as_strided`` to its argument's base, laid out in memory as the base is."""
    arguments = arguments_of(node)
    view, base = arguments["self"], arguments["self"]
    while (source := _source_of_view(base)) is not None:
        base = source
    memory, offset = value_of(base), arguments["storage_offset"]
    offset = value_of(view).storage_offset() if offset is None else offset
    order = sorted(range(memory.dim()), key=memory.stride, reverse=True)
    if not memory.permute(order).is_contiguous():
        _logger.warning(
            "%s reads memory of %s that no program has: its elements are not contiguous, and their "
            "strides are lost. The results will differ from PyTorch's",
            node.name,
            base.name,
        )
        return
    if not memory.is_contiguous():
        base = insert(node, _ATEN.permute.default, base, order)
        base = insert(node, _ATEN.clone.default, base, memory_format=torch.contiguous_format)
    set_arguments(node, self=base, storage_offset=offset - memory.storage_offset())


def _source_of_view(node: Node) -> Node | None:
    """Return the argument that a result is a view of, or None."""
    call: Any = node.args[0] if node.target is operator.getitem else node
    schema = schema_of(call.target)
    if schema is None or not any(result.alias_info for result in schema.returns):
        return None
    if not all(_are_static(value_of(source).shape) for source in call.all_input_nodes):
        return None
    without_data = {n: _without_data(value_of(n)) for n in call.all_input_nodes}
    args, kwargs = map_arg((call.args, call.kwargs), without_data.__getitem__)
    result = call.target(*args, **kwargs)
    result = result if call is node else result[node.args[1]]
    return next((n for n, value in without_data.items() if share_memory(value, result)), None)


def _are_static(*numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for group in numbers for number in group)


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


_STRIDED = frozenset({_ATEN.as_strided.default, _ATEN.as_strided_copy.default})


def drop_linear_algebra_checks(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with linear algebra ops that do not check their results.

    A singular matrix then gives infinities.
    """
    table = {op: _unchecked_call(op, unchecked) for op, unchecked in _UNCHECKED.items()}
    return decompose(program, table)


_UNCHECKED: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        _ATEN.inverse.default: _ATEN.linalg_inv_ex.default,
        _ATEN.linalg_cholesky.default: _ATEN.linalg_cholesky_ex.default,
        _ATEN.linalg_inv.default: _ATEN.linalg_inv_ex.default,
        _ATEN.linalg_ldl_factor.default: _ATEN.linalg_ldl_factor_ex.default,
        _ATEN.linalg_lu_factor.default: _ATEN.linalg_lu_factor_ex.default,
        _ATEN.linalg_solve.default: _ATEN.linalg_solve_ex.default,
    }
)


def _unchecked_call(op: Any, unchecked: OpOverload) -> Callable[..., Any]:
    """Return ``op`` computed by ``unchecked``, without its last result, the error code."""
    count = len(schema_of(op).returns)

    def call(*args: Any, **keywords: Any) -> Any:
        results = unchecked(*args, **keywords)
        return results[0] if count == 1 else tuple(results[:count])

    return call
