"""JAX functions as Core ML models.

``compile`` returns a function that is called as the JAX function is, with trees of arrays; ``save``
writes what ``jax.export`` has exported. Needs JAX: ``pip install 'coreml-delegate[jax]'``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.errors import InputError, LoweringError, OptionError
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.stablehlo import Program
from coreml_delegate.stablehlo import compile as compile_program
from coreml_delegate.stablehlo import convert as convert_program

Place = int | str
"""An argument: its position, or its name if it is passed by name."""


class Function:
    """A compiled JAX function, which is called as it is. Safe to use from several threads.

    Attributes:
        program: What it became.
    """

    def __init__(self, program: Program, signature: _Signature) -> None:
        self.program = program
        self._signature = signature
        self._dtypes = [np.dtype(type.dtype.numpy) for type in program.parameters.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns, with NumPy arrays for leaves.

        Keys of ``jax.random`` are taken as such or as their data, and returned as their data.

        Raises:
            InputError: Other trees, shapes or element types than it was compiled for; other static
                arguments; or it has states, and what ``session`` returns has to be called.
        """
        if self._signature.states:
            raise InputError(
                "the function has states", remedy="Call what session() returns, which holds them"
            )
        return self.run(args, kwargs, None)

    def session(self) -> Session:
        """Return the function with new states, all zeros."""
        return Session(self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State | None) -> Any:
        """Call it with a state, from ``program.make_state``; see ``Session``."""
        leaves = self._signature.leaves(args, kwargs)
        for n, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True)):
            if type(leaf) is not np.ndarray or leaf.dtype is not dtype:
                leaves[n] = _as_array(leaf)
        return self._signature.returned(self.program.run(*leaves, state=state))

    def save(self, path: Path | str) -> None:
        """Write the model as an ``.mlpackage`` or ``.pte``."""
        self.program.save(path)


class Session:
    """A compiled JAX function with its states: the arguments that it keeps between calls.

    It takes the other arguments, and returns a tuple of the other results.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.state = function.program.make_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results that are no states, and replace the states; see ``Function``."""
        return self.function.run(args, kwargs, self.state)


class _Signature:
    """Maps a function's arguments and results to those of its program.

    Args:
        exported: From ``jax.export``.
        static: Values of static arguments.
        states: Arguments that are states, with the positions of the results that replace them.

    Raises:
        OptionError: ``states`` names what there is not.
    """

    def __init__(
        self, exported: Any, static: Mapping[Place, Any], states: Mapping[Place, int]
    ) -> None:
        self._tree_util = _jax("jax.tree_util")
        self._exported = exported
        self._static = dict(static)
        self.states = dict(states)
        # Trees with the number of each leaf in its place.
        args, kwargs = self._numbered(exported.in_tree)
        self._positional = dict(zip(_dynamic_positions(len(args), static), args, strict=True))
        self._named: dict[str, Any] = dict(kwargs)
        self._results = self._numbered(exported.out_tree)
        arguments: dict[Place, Any] = {**self._positional, **self._named}
        for place, result in states.items():
            self._check_state(place, result, arguments)
        held = {leaf for place in states for leaf in self._leaves(arguments[place])}
        self._kept = list(exported.module_kept_var_idx)
        self._taken = [n for n in self._kept if n not in held]
        self.program_states = self._program_states(arguments)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves that the program takes.

        Raises:
            InputError: The arguments have another structure, or static ones another value.
        """
        given: tuple[Any, Any] = (args, kwargs)
        if self._static or self.states:
            given = ((*self._positional_arguments(args),), self._named_arguments(kwargs))
        leaves, tree = self._tree_util.tree_flatten(given)
        if tree != self._exported.in_tree:
            raise InputError(
                "the arguments have another structure than the function was compiled for",
                got=str(tree),
                expected=str(self._exported.in_tree),
            )
        return [leaves[n] for n in self._taken]

    def returned(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returns, of what its program returns."""
        if not self.states:
            return self._tree_util.tree_unflatten(self._exported.out_tree, arrays)
        replaced = set(self.states.values())
        rest = tuple(result for n, result in enumerate(self._results) if n not in replaced)
        return self._tree_util.tree_unflatten(self._tree_util.tree_structure(rest), arrays)

    def _numbered(self, tree: Any) -> Any:
        return self._tree_util.tree_unflatten(tree, range(tree.num_leaves))

    def _leaves(self, numbered: Any) -> list[int]:
        return self._tree_util.tree_leaves(numbered)

    def _positional_arguments(self, args: Sequence[Any]) -> Iterator[Any]:
        """Yield the arguments without static ones, and with numbers in place of states."""
        given = iter(enumerate(args))
        places = sorted({*self._positional, *(n for n in self._static if isinstance(n, int))})
        for place in places:
            if place in self.states:
                yield self._positional[place]
                continue
            found = next(given, None)
            if found is None:
                return
            if place in self._static:
                self._check_static(place, found[1])
            else:
                yield found[1]
        yield from (argument for _, argument in given)

    def _named_arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: self._named[name] for name in self._named if name in self.states}
        for name, argument in kwargs.items():
            if name in self._static:
                self._check_static(name, argument)
            else:
                named[name] = argument
        return named

    def _check_static(self, place: Place, given: Any) -> None:
        if given != self._static[place]:
            raise InputError(
                f"static argument {place!r} is another than the function was compiled for",
                got=repr(given),
                expected=repr(self._static[place]),
            )

    def _check_state(self, place: Place, result: int, arguments: Mapping[Place, Any]) -> None:
        if place not in arguments:
            raise OptionError(
                "states names an argument that the function does not have",
                got=repr(place),
                expected=", ".join(map(repr, arguments)),
            )
        if not isinstance(self._results, tuple | list) or not 0 <= result < len(self._results):
            raise OptionError(
                f"state {place!r} is replaced by a result that the function does not have",
                got=str(result),
                expected="the position of one in the tuple that it returns",
            )
        structures = [
            str(self._tree_util.tree_structure(tree))
            for tree in (self._results[result], arguments[place])
        ]
        if structures[0] != structures[1]:
            raise OptionError(
                f"state {place!r} is replaced by a result of another structure",
                got=structures[0],
                expected=structures[1],
            )

    def _program_states(self, arguments: Mapping[Place, Any]) -> dict[int | str, int]:
        """Return which arguments of the program are states, and what replaces them."""
        found: dict[int | str, int] = {}
        for place, result in self.states.items():
            pairs = zip(
                self._leaves(arguments[place]), self._leaves(self._results[result]), strict=True
            )
            for argument, replacement in pairs:
                if argument not in self._kept:
                    raise OptionError(
                        f"state {place!r} is not used by the function", got=repr(place)
                    )
                found[self._kept.index(argument)] = replacement
        return found


def compile(
    function: Callable[..., Any],
    *args: Any,
    states: Mapping[Place, int] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Compile a JAX function.

    Args:
        function: A function, or ``jax.jit`` of one, whose static arguments stay static.
        args: Examples of its arguments, or ``jax.ShapeDtypeStruct``, whose sizes may be symbolic.
        states: Arguments that the model keeps between calls, each with the position of the result
            that replaces it, a tree of the same structure.
        options: Of ``stablehlo.compile``, as ``{"engine": "openvino"}``.
        kwargs: Examples of arguments that are passed by name.

    Raises:
        LoweringError: JAX is not installed, or the function has what Core ML cannot express.
        OptionError: ``states`` or an option is not accepted.
    """
    jitted = function if hasattr(function, "lower") else _jax("jax").jit(function)
    exported = export(jitted, *args, **kwargs)
    static = _static_arguments(jitted, args, kwargs)
    signature = _Signature(exported, static, states or {})
    program = compile_program(exported, states=signature.program_states, **(options or {}))
    return Function(program, signature)


def export(jitted: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``jax.export`` of a jitted function for the CPU.

    What JAX writes for the CPU is made of operations; for other devices there may be kernels.

    Raises:
        LoweringError: JAX is not installed, or the function calls back to Python.
    """
    try:
        return _jax("jax.export").export(jitted, platforms=("cpu",))(*args, **kwargs)
    except NotImplementedError as error:
        # JAX exports no callbacks and does not say which; what it lowers names them.
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
    """Write what ``jax.export`` has exported as a model; symbolic sizes become ranges.

    Args:
        exported: ``jax.export.export(jax.jit(function))(*specs)``, or its serialized form.
        path: A ``.mlpackage`` or ``.pte``.
        options: Of ``stablehlo.compile``.

    Raises:
        LoweringError: It has what Core ML cannot express.
        OSError: It cannot be written.
    """
    return convert_program(exported, path, **options)


def _jax(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LoweringError(
            "JAX is not installed", got=str(error), remedy="pip install 'coreml-delegate[jax]'"
        ) from error


def _as_array(leaf: Any) -> Any:
    """Return an argument as JAX takes it: 64 bits only where JAX is set to have them."""
    dtypes = _jax("jax.dtypes")
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        array = np.asarray(leaf)
        return array.astype(dtypes.canonicalize_dtype(array.dtype), copy=False)
    if hasattr(leaf, "dtype") and dtypes.issubdtype(leaf.dtype, dtypes.prng_key):
        return np.asarray(_jax("jax.random").key_data(leaf))
    return leaf


def _static_arguments(
    jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Place, Any]:
    # JAX shows them nowhere else.
    info = getattr(jitted, "_jit_info", None)
    positions = [
        n % len(args) for n in getattr(info, "static_argnums", ()) if -len(args) <= n < len(args)
    ]
    names = [name for name in getattr(info, "static_argnames", ()) if name in kwargs]
    return {**{n: args[n] for n in positions}, **{name: kwargs[name] for name in names}}


def _dynamic_positions(count: int, static: Mapping[Place, Any]) -> list[int]:
    """Return the positions, among all arguments, of those that are not static."""
    found: list[int] = []
    position = 0
    while len(found) < count:
        if position not in static:
            found.append(position)
        position += 1
    return found
