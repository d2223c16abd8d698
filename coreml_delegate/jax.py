"""JAX functions as Core ML models.

``compile`` returns a function with the JAX function's signature, which takes trees of arrays;
``save`` writes a program of ``jax.export``. Needs JAX: ``pip install 'coreml-delegate[jax]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.errors import InputError, LoweringError, OptionError
from coreml_delegate.graph import Backend
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.declaration import checked
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.patches.jax import jax_module, static_arguments
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.stablehlo import Program
from coreml_delegate.stablehlo import compile as compile_program
from coreml_delegate.stablehlo import convert as convert_program

ArgumentKey = int | str
"""Key of an argument: its position, or its name if it is passed by name."""


class Function:
    """A compiled JAX function, called like the original. Thread-safe.

    Attributes:
        program: The compiled program.
    """

    def __init__(self, program: Program, signature: _Signature) -> None:
        self.program = program
        self._signature = signature
        self._dtypes = [np.dtype(type.dtype.numpy) for type in program.parameters.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return its results, with NumPy arrays as leaves.

        Keys of ``jax.random`` are accepted as keys or as their data, and returned as their data.

        Raises:
            InputError: Trees, shapes, element types or static arguments other than those compiled;
                or the function has states, so that ``session()`` has to be called.
        """
        if self._signature.states:
            raise InputError(
                "the function has states",
                remedy="Call the result of session(), which has the states",
            )
        return self.run(args, kwargs, None)

    def session(self) -> Session:
        """Return the function with new states, all zeros."""
        return Session(self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State | None) -> Any:
        """Call the function with a state from ``program.make_state``; see ``Session``."""
        leaves = self._signature.leaves(args, kwargs)
        for n, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True)):
            if type(leaf) is not np.ndarray or leaf.dtype is not dtype:
                leaves[n] = _as_array(leaf)
        return self._signature.results(self.program.run(*leaves, state=state))

    def save(self, path: Path | str) -> None:
        """Write the model as an ``.mlpackage`` or ``.pte``."""
        self.program.save(path)


class Session:
    """A compiled JAX function with its states, which are arguments kept between calls.

    It takes the other arguments, and returns a tuple of the other results.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.state = function.program.make_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, replace the states, and return the other results; see ``Function``."""
        return self.function.run(args, kwargs, self.state)


class _Signature:
    """Maps a function's arguments and results to the program's inputs and outputs.

    Args:
        exported: From ``jax.export``.
        static: Values of static arguments.
        states: Arguments that are states, with the positions of the results that replace them.

    Raises:
        OptionError: ``states`` names a missing argument or result.
    """

    def __init__(
        self, exported: Any, static: Mapping[ArgumentKey, Any], states: Mapping[ArgumentKey, int]
    ) -> None:
        self._tree_util = jax_module("jax.tree_util")
        self._exported = exported
        self._static = dict(static)
        self.states = dict(states)
        # Trees whose leaves are their own numbers.
        args, kwargs = self._number_leaves(exported.in_tree)
        self._positional = dict(zip(_dynamic_positions(len(args), static), args, strict=True))
        self._named: dict[str, Any] = dict(kwargs)
        self._results = self._number_leaves(exported.out_tree)
        arguments: dict[ArgumentKey, Any] = {**self._positional, **self._named}
        for key, result in states.items():
            self._check_state(key, result, arguments)
        state_leaves = {leaf for key in states for leaf in self._leaves(arguments[key])}
        self._used_leaves = list(exported.module_kept_var_idx)
        self._input_leaves = [n for n in self._used_leaves if n not in state_leaves]
        self.program_states = self._program_states(arguments)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the program's inputs: the leaves of its arguments without states.

        Raises:
            InputError: The arguments have another structure, or a static argument another value.
        """
        dynamic: tuple[Any, Any] = (args, kwargs)
        if self._static or self.states:
            dynamic = ((*self._positional_arguments(args),), self._named_arguments(kwargs))
        leaves, tree = self._tree_util.tree_flatten(dynamic)
        if tree != self._exported.in_tree:
            raise InputError(
                "the arguments have another structure than the function was compiled for",
                got=str(tree),
                expected=str(self._exported.in_tree),
            )
        return [leaves[n] for n in self._input_leaves]

    def results(self, arrays: Sequence[Any]) -> Any:
        """Return the function's results from the program's outputs."""
        if not self.states:
            return self._tree_util.tree_unflatten(self._exported.out_tree, arrays)
        replaced = set(self.states.values())
        remaining = tuple(result for n, result in enumerate(self._results) if n not in replaced)
        return self._tree_util.tree_unflatten(self._tree_util.tree_structure(remaining), arrays)

    def _number_leaves(self, tree: Any) -> Any:
        return self._tree_util.tree_unflatten(tree, range(tree.num_leaves))

    def _leaves(self, numbered: Any) -> list[int]:
        return self._tree_util.tree_leaves(numbered)

    def _positional_arguments(self, args: Sequence[Any]) -> Iterator[Any]:
        """Yield the positional arguments without static arguments, with leaf numbers for states."""
        entries = iter(enumerate(args))
        keys = sorted({*self._positional, *(n for n in self._static if isinstance(n, int))})
        for key in keys:
            if key in self.states:
                yield self._positional[key]
                continue
            entry = next(entries, None)
            if entry is None:
                return
            if key in self._static:
                self._check_static(key, entry[1])
            else:
                yield entry[1]
        yield from (argument for _, argument in entries)

    def _named_arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: self._named[name] for name in self._named if name in self.states}
        for name, argument in kwargs.items():
            if name in self._static:
                self._check_static(name, argument)
            else:
                named[name] = argument
        return named

    def _check_static(self, key: ArgumentKey, value: Any) -> None:
        if value != self._static[key]:
            raise InputError(
                f"static argument {key!r} is another than the function was compiled for",
                got=repr(value),
                expected=repr(self._static[key]),
            )

    def _check_state(
        self, key: ArgumentKey, result: int, arguments: Mapping[ArgumentKey, Any]
    ) -> None:
        if key not in arguments:
            raise OptionError(
                "states names an argument that the function does not have",
                got=repr(key),
                expected=", ".join(map(repr, arguments)),
            )
        if not isinstance(self._results, tuple | list) or not 0 <= result < len(self._results):
            raise OptionError(
                f"state {key!r} is replaced by a result that the function does not have",
                got=str(result),
                expected="a position in the tuple that it returns",
            )
        structures = [
            str(self._tree_util.tree_structure(tree))
            for tree in (self._results[result], arguments[key])
        ]
        if structures[0] != structures[1]:
            raise OptionError(
                f"state {key!r} is replaced by a result of another structure",
                got=structures[0],
                expected=structures[1],
            )

    def _program_states(self, arguments: Mapping[ArgumentKey, Any]) -> dict[int | str, int]:
        """Return the position of the result that replaces each state, by input position."""
        result_by_input: dict[int | str, int] = {}
        for key, result in self.states.items():
            pairs = zip(
                self._leaves(arguments[key]), self._leaves(self._results[result]), strict=True
            )
            for argument, replacement in pairs:
                if argument not in self._used_leaves:
                    raise OptionError(f"state {key!r} is not used by the function", got=repr(key))
                result_by_input[self._used_leaves.index(argument)] = replacement
        return result_by_input


def compile(
    function: Callable[..., Any],
    *args: Any,
    states: Mapping[ArgumentKey, int] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Compile a JAX function.

    Args:
        function: A function, or ``jax.jit`` of a function, whose static arguments stay static.
        args: Example arguments, or ``jax.ShapeDtypeStruct``, whose sizes may be symbolic.
        states: Arguments that the model keeps between calls, each with the position of the result
            that replaces it, a tree of the same structure.
        options: Options of ``stablehlo.compile``, for example ``{"engine": "openvino"}``. With
            ``"precision": "auto"`` the example arguments are measured, or ``precision_data``: a
            list of samples, each a tuple of the positional arguments of a call, without states.
        kwargs: Example arguments that are passed by name.

    Raises:
        LoweringError: JAX is not installed, or Core ML cannot express the function.
        OptionError: ``states`` or an option is not accepted.
    """
    jitted = function if hasattr(function, "lower") else jax_module("jax").jit(function)
    exported = export(jitted, *args, **kwargs)
    static = _static_arguments(jitted, args, kwargs)
    signature = _Signature(exported, static, states or {})
    own_options = dict(options or {})
    own_options["precision_data"] = _samples(signature, args, kwargs, own_options)
    program = compile_program(exported, states=signature.program_states, **own_options)
    return Function(program, signature)


def _samples(
    signature: _Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[list[Any]] | None:
    """Return the samples to measure with, each the program's inputs; None if none are needed."""
    data = checked(PartitionerKeywords, "precision_data", options.get("precision_data"))
    if data is None:
        backend = Backend(precision=options.get("precision", Precision.FLOAT32))
        if backend.compile_options.precision is not Precision.AUTO:
            return None
        data = [[arg for n, arg in enumerate(args) if n not in signature.states]]
    named = {name: arg for name, arg in kwargs.items() if name not in signature.states}
    samples = [signature.leaves(tuple(sample), named) for sample in data]
    if any(
        isinstance(leaf, jax_module("jax").ShapeDtypeStruct)
        for leaves in samples
        for leaf in leaves
    ):
        raise OptionError(
            "precision auto measures a function on example inputs",
            got="jax.ShapeDtypeStruct",
            expected="arrays",
            remedy="Pass arrays as example arguments, or precision_data among the options",
        )
    return [[_as_array(leaf) for leaf in leaves] for leaves in samples]


def export(jitted: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``jax.export`` of a jitted function for the CPU.

    For the CPU, JAX writes operations; for other devices, it may write kernels.

    Raises:
        LoweringError: JAX is not installed, or the function calls back to Python.
    """
    try:
        return jax_module("jax.export").export(jitted, platforms=("cpu",))(*args, **kwargs)
    except NotImplementedError as error:
        # JAX does not export callbacks, nor name them; the lowered program names them.
        compile_program(jitted.lower(*args, **kwargs), "reference")
        raise LoweringError("JAX cannot export the function", got=str(error)) from error
    except ValueError as error:
        if "checkify" not in str(error):
            raise
        raise LoweringError(
            "checks of checkify fail on the host, where a Core ML model does not run",
            got=str(error).partition(". ")[0],
            expected="a function without checks, or one that returns their error",
            remedy="Compile jax.experimental.checkify.checkify(function)",
        ) from error


def save(exported: Any, path: Path | str, **options: Any) -> Program:
    """Write a program of ``jax.export`` as a model; symbolic sizes become ranges.

    Args:
        exported: ``jax.export.export(jax.jit(function))(*specs)``, or its serialized form.
        path: A ``.mlpackage`` or ``.pte``.
        options: Options of ``stablehlo.compile``.

    Raises:
        LoweringError: Core ML cannot express the program.
        OSError: The file cannot be written.
    """
    return convert_program(exported, path, **options)


def _as_array(leaf: Any) -> Any:
    """Convert an argument as JAX does: to 64 bits only if JAX is configured for them."""
    dtypes = jax_module("jax.dtypes")
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        array = np.asarray(leaf)
        return array.astype(dtypes.canonicalize_dtype(array.dtype), copy=False)
    if hasattr(leaf, "dtype") and dtypes.issubdtype(leaf.dtype, dtypes.prng_key):
        return np.asarray(jax_module("jax.random").key_data(leaf))
    return leaf


def _static_arguments(
    jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[ArgumentKey, Any]:
    numbers, names = static_arguments(jitted)
    positions = [n % len(args) for n in numbers if -len(args) <= n < len(args)]
    names = [name for name in names if name in kwargs]
    return {**{n: args[n] for n in positions}, **{name: kwargs[name] for name in names}}


def _dynamic_positions(count: int, static: Mapping[ArgumentKey, Any]) -> list[int]:
    """Return the positions of the dynamic arguments among all arguments."""
    positions: list[int] = []
    position = 0
    while len(positions) < count:
        if position not in static:
            positions.append(position)
        position += 1
    return positions
