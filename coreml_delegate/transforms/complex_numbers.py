"""Complex numbers inside a program, rewritten to pairs of real values.

Core ML has no complex numbers, and ExecuTorch has few kernels for them. Each complex value becomes
its real and imaginary part; each operator on complex numbers becomes operators on these parts
(``complex_operators``), and a Fourier transform products with matrices (``fourier``). Inputs and
outputs of the program stay real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tag
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from coreml_delegate.errors import LoweringError, UnsupportedOperatorError
from coreml_delegate.exported.module_scope import scopes_of
from coreml_delegate.exported.source_lines import source_of
from coreml_delegate.ops.call import target_name, tensors_of
from coreml_delegate.ops.constants import stored_constants
from coreml_delegate.ops.edits import add_placeholder, all_nodes, value_of
from coreml_delegate.patches.torch import FakeTensor, OpOverload
from coreml_delegate.transforms.complex_operators import OPERATORS
from coreml_delegate.transforms.complex_pairs import (
    ATEN,
    COMPONENTS,
    FormError,
    Pair,
    PairCall,
    Part,
)

_PREFIX = "coreml_delegate_fourier"
_SUFFIXES = ("real", "imag")

# Ops with real arguments and results that only occur with complex numbers.
_ACCOMPANYING = frozenset(
    {
        ATEN.stft.default,
        ATEN.stft.center,
        ATEN.fft_fftfreq.default,
        ATEN.fft_rfftfreq.default,
    }
)


def split_complex_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with a pair of real values in place of each complex value.

    Args:
        program: In ATen dialect; it is not changed.

    Returns:
        A program with the same inputs and outputs. A complex parameter, buffer or constant ``x``
        becomes ``x_real`` and ``x_imag``. A program without complex numbers is returned unchanged.

    Raises:
        UnsupportedOperatorError: An operator on complex numbers cannot be computed on pairs.
        LoweringError: An input or output is complex.
    """
    if not any(_is_complex(node) for node in all_nodes(program)):
        return program
    _check_boundary(program)
    copied = _decompose(program)
    _Splitter(copied).run()
    return copied


def _decompose(program: ExportedProgram) -> ExportedProgram:
    """Return a functional copy with composite ops on complex numbers decomposed.

    Ops in ``OPERATORS`` are not decomposed.
    """
    table = default_decompositions()
    copied = program.run_decompositions({})
    decomposed: set[Any] = set()
    while True:
        targets = {n.target for n in copied.graph.nodes if _is_complex_call(n)} - decomposed
        composite = {
            op: table[op] for op in targets if target_name(op) not in OPERATORS and op in table
        }
        if not composite:
            return copied
        decomposed |= composite.keys()
        copied = copied.run_decompositions(composite)


class _Splitter:
    """Splits the complex values of one program, in place.

    Args:
        program: Functional.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._pairs: dict[Node, Pair] = {}
        self._replaced: list[Node] = []
        self._constants: dict[Any, Node] = {}
        self._stored: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._values: dict[Node, torch.Tensor | None] = {
            node: None if isinstance(value, FakeTensor) else value
            for node, _, value in stored_constants(program)
        }

    def run(self) -> None:
        """Replace all complex values."""
        graph = self._program.graph
        for node in list(graph.nodes):
            if node.op == "placeholder" and _has_complex_value(node):
                self._split_state(node)
            elif node.op == "output":
                self._split_results(node)
            elif _is_complex_call(node):
                self._split_call(node)
        for node in reversed(self._replaced):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()
        self._program.graph_module.recompile()

    # State

    def _split_state(self, node: Node) -> None:
        """Replace a complex parameter, buffer or constant by its two parts."""
        program, specs = self._program, self._program.graph_signature.input_specs
        index = next(i for i, spec in enumerate(specs) if spec.arg.name == node.name)
        spec = specs[index]
        key = str(spec.target)
        state: dict[str, Any] = (
            program.state_dict if key in program.state_dict else program.constants
        )
        parts = self._real_and_imag(state.pop(key))
        nodes: list[Node] = []
        for suffix, part, fake in zip(
            _SUFFIXES, parts, _real_and_imag(node.meta["val"]), strict=True
        ):
            state[f"{key}_{suffix}"] = part
            with program.graph.inserting_before(node):
                new = program.graph.placeholder(f"{node.name}_{suffix}")
            new.target = new.name
            new.meta = {**node.meta, "val": fake}
            nodes.append(new)
        specs[index : index + 1] = [
            InputSpec(
                spec.kind, TensorArgument(new.name), f"{key}_{suffix}", persistent=spec.persistent
            )
            for new, suffix in zip(nodes, _SUFFIXES, strict=True)
        ]
        self._pairs[node] = Pair(*nodes)
        self._replaced.append(node)

    def _real_and_imag(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of a stored tensor; a tensor with several names has shared parts."""
        if id(value) not in self._stored:
            parts = _real_and_imag(value)
            if isinstance(value, torch.nn.Parameter):
                real, imag = (torch.nn.Parameter(p, value.requires_grad) for p in parts)
                parts = real, imag
            self._stored[id(value)] = value, parts
        return self._stored[id(value)][1]

    # Calls

    def _split_call(self, node: Node) -> None:
        function = OPERATORS.get(target_name(node.target))
        if function is None:
            raise _unsupported(node, f"the operator {target_name(node.target)}")
        call = PairCall(node, self._pairs, self._constant, self._value)
        try:
            result = function(call)
        except FormError as error:
            raise _unsupported(node, str(error), error.remedy) from error
        if isinstance(result, Pair):
            self._pairs[node] = _as_nodes(call, result)
        elif isinstance(result, Node):
            node.replace_all_uses_with(result)
        elif node.users:  # a real result of zeros
            node.replace_all_uses_with(call.emit(ATEN.zeros_like.default, call.pair("self").node))
        self._replaced.append(node)

    def _constant(
        self, key: tuple[Any, ...], value: Callable[[], torch.Tensor], dtype: torch.dtype
    ) -> Node:
        """Return the constant of a key; add it to the program if it is missing."""
        if (key, dtype) not in self._constants:
            self._constants[key, dtype] = self._add(value().to(dtype).contiguous())
        return self._constants[key, dtype]

    def _add(self, value: torch.Tensor) -> Node:
        program = self._program
        name = f"{_PREFIX}_{len(self._constants)}"
        like = next(iter(program.graph.nodes))
        node = add_placeholder(program, name, value, like)
        program.graph_signature.input_specs.insert(
            0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
        )
        program.constants[name] = value
        return node

    def _value(self, node: Node) -> torch.Tensor | None:
        """Return the value of a node computed only from constants, None for other nodes."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> torch.Tensor | None:
        target = node.target
        if not isinstance(target, OpOverload) or Tag.nondeterministic_seeded in target.tags:
            return None
        values = {n: self._value(n) for n in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            result = target(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else None

    # Results

    def _split_results(self, output: Node) -> None:
        """Split the result of a mutated complex buffer, and rename replaced results."""
        specs = self._program.graph_signature.output_specs
        results: list[Any] = []
        split_specs: list[OutputSpec] = []
        for node, spec in zip(list(output.args[0]), specs, strict=True):  # pyright: ignore[reportArgumentType]
            if node not in self._pairs:
                if isinstance(node, Node) and isinstance(spec.arg, TensorArgument):
                    spec.arg = TensorArgument(node.name)
                results.append(node)
                split_specs.append(spec)
                continue
            call = PairCall(node, self._pairs, self._constant, self._value)
            for suffix, part in zip(_SUFFIXES, call.as_nodes(self._pairs[node]), strict=True):
                arg = TensorArgument(part.name)
                split_specs.append(OutputSpec(spec.kind, arg, f"{spec.target}_{suffix}"))
                results.append(part)
        specs[:] = split_specs
        output.args = (tuple(results),)
        output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in results)


def _as_nodes(call: PairCall, pair: Pair) -> Pair:
    """Return a pair of nodes (or None) in the dtype and shape of the complex value."""
    value = call.node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return pair
    dtype = COMPONENTS[value.dtype]

    def fit(part: Part) -> Part:
        if part is None:
            return None
        if not isinstance(part, Node):
            part = call.emit(ATEN.full_like.default, pair.node, part)
        if value_of(part).dtype is not dtype:
            part = call.emit(ATEN._to_copy.default, part, dtype=dtype)
        shape, target_shape = value_of(part).shape, value.shape
        static_sizes = [
            (a, b) for a, b in zip(shape, target_shape, strict=False) if type(a) is type(b) is int
        ]
        if len(shape) != len(target_shape) or any(a != b for a, b in static_sizes):
            sizes = [size if isinstance(size, int) else -1 for size in target_shape]
            part = call.emit(ATEN.expand.default, part, sizes)
        return part

    return Pair(*map(fit, pair.parts))


def _real_and_imag(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stacked = torch.view_as_real(value.detach().resolve_conj())
    real, imag = (
        stacked.select(-1, n).clone(memory_format=torch.contiguous_format) for n in (0, 1)
    )
    return real, imag


# Checks


def _check_boundary(program: ExportedProgram) -> None:
    """Refuse complex inputs and outputs of the program, and complex values in branches and loops.

    Raises:
        LoweringError: The program has a complex input or output.
        UnsupportedOperatorError: A branch or loop has complex values.
    """
    values = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    sides = (
        ("takes a complex input", signature.input_specs, _INPUTS, _PASS_PAIRS),
        ("returns a complex tensor", signature.output_specs, _OUTPUTS, _RETURN_PAIRS),
    )
    for obstacle, specs, kinds, remedy in sides:
        for spec in specs:
            node = values.get(str(getattr(spec.arg, "name", None)))
            if spec.kind in kinds and node is not None and _has_complex_value(node):
                dtypes = (
                    str(t.dtype).removeprefix("torch.") for t in tensors_of(node.meta.get("val"))
                )
                raise LoweringError(
                    f"the model {obstacle}, which Core ML does not have",
                    got=f"{node.name} of {', '.join(dtypes)}",
                    expected="real tensors",
                    remedy=remedy,
                )
    for module in program.graph_module.modules():
        if module is program.graph_module or not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if _is_complex(node):
                raise _unsupported(node, "a branch or loop of the graph")


_INPUTS = frozenset({InputKind.USER_INPUT})
_OUTPUTS = frozenset({OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION})
_PASS_PAIRS = (
    "Pass torch.view_as_real(x), and begin the model with torch.view_as_complex of its input"
)
_WRITE_REAL = "Write this part of the model with real tensors: torch.view_as_real, x.real, x.imag"
_RETURN_PAIRS = "Return torch.view_as_real(y), and take torch.view_as_complex of the result"


def _unsupported(node: Node, obstacle: str, remedy: str | None = None) -> UnsupportedOperatorError:
    """Return the error for a call that cannot be rewritten to calls on reals."""
    modules = scopes_of(node)
    module_text = ""
    if modules:
        kind = modules[-1].class_name.rpartition(".")[2]
        module_text = f" at {modules[-1].path or 'root'} ({kind})"
    source = source_of(node)
    return UnsupportedOperatorError(
        "complex numbers cannot be represented as pairs of reals here",
        got=f"{obstacle}{module_text}{f', {source}' if source else ''}",
        expected="the operators of docs/complex.md",
        remedy=remedy or _WRITE_REAL,
    )


def _is_complex(node: Node) -> bool:
    """Return whether a node has a complex value, or only occurs with such nodes."""
    return node.target in _ACCOMPANYING or _has_complex_value(node)


def _has_complex_value(node: Node) -> bool:
    return any(tensor.dtype.is_complex for tensor in tensors_of(node.meta.get("val")))


def _is_complex_call(node: Node) -> bool:
    """Return whether a call has complex arguments or results."""
    if node.op != "call_function":
        return False
    return _is_complex(node) or any(map(_has_complex_value, node.all_input_nodes))
