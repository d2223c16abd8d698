"""The table of MIL ops that an engine supports: one Python function per version of an op.

Each engine has one :class:`OpTable`, filled by its decorator: ``@kernel(...)`` of the reference
engine and ``@translation(...)`` of OpenVINO. The signature of a function is the schema of the op:
its parameters have MIL's names and defaults, and their annotations define the form in which the
engine passes the arguments. Keyword-only parameters are not part of the schema; they are options
that the engine sets.

An op may have functions for several opsets. A program uses the newest version of its opset. A later
version of MIL that only adds optional parameters has no function of its own. If an earlier version
lacks a parameter and behaves differently, it is the same function with a value for that parameter.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.targets import Opset

Form = TypeVar("Form")
"""How an argument reaches a function: an enum of the engine."""


@dataclass(frozen=True, slots=True)
class Parameter(Generic[Form]):
    """One parameter of an op: the form of its argument, and whether a program must have it."""

    form: Form
    required: bool


@dataclass(frozen=True, slots=True)
class Schema(Generic[Form]):
    """The schema of an op, read from the signature of a function.

    Attributes:
        parameters: The op's parameters by name, in the order of the signature.
        options: Names of the keyword-only parameters, which the engine sets.
    """

    parameters: Mapping[str, Parameter[Form]]
    options: frozenset[str]

    @classmethod
    def read(
        cls,
        function: Callable[..., Any],
        form_of: Callable[[Any], Form],
        fixed: Collection[str] = (),
    ) -> Schema[Form]:
        """Read the schema from a signature with annotations of all parameters.

        ``form_of`` returns the form that an annotation declares; ``fixed`` are parameters that this
        version of the op lacks.
        """
        hints = typing.get_type_hints(function, include_extras=True)
        parameters: dict[str, Parameter[Form]] = {}
        options: set[str] = set()
        for name, parameter in inspect.signature(function).parameters.items():
            if name in fixed:
                continue
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                options.add(name)
            else:
                required = parameter.default is inspect.Parameter.empty
                parameters[name] = Parameter(form_of(hints[name]), required)
        return cls(parameters, frozenset(options))


@dataclass(frozen=True, slots=True, eq=False)
class OpVersion(Generic[Form]):
    """One version of one op.

    Attributes:
        op_type: MIL op type.
        since: First opset with this version.
        function: Takes the op's arguments by keyword.
        schema: The signature of ``function``, without ``fixed``.
        fixed: Values of parameters that later versions have and this version lacks.
    """

    op_type: str
    since: Opset
    function: Callable[..., Any]
    schema: Schema[Form]
    fixed: Mapping[str, object]


Version = TypeVar("Version", bound=OpVersion[Any])


class OpTable(Generic[Version]):
    """The ops of one engine, registered by the modules of a package, one per family of ops.

    Args:
        noun: The engine's word for a function, for messages: ``kernel``.
        package: Full name of the package; its modules are imported at the first lookup.
    """

    def __init__(self, noun: str, package: str) -> None:
        self._noun = noun
        self._package = package
        self._versions: dict[str, dict[Opset, Version]] = {}

    @functools.cached_property
    def families(self) -> tuple[str, ...]:
        """Names of the families' modules, which are imported."""
        folder = importlib.import_module(self._package).__path__
        names = tuple(sorted(module.name for module in pkgutil.iter_modules(folder)))
        for name in names:
            importlib.import_module(f"{self._package}.{name}")
        return names

    def add(self, version: Version) -> None:
        """Add a version of an op.

        Raises:
            ValueError: The op already has a version for that opset.
        """
        versions = self._versions.setdefault(version.op_type, {})
        if version.since in versions:
            raise ValueError(
                f"op {version.op_type!r} has two {self._noun}s since {version.since.name}"
            )
        versions[version.since] = version

    def find(self, op_type: str, opset: Opset) -> Version | None:
        """Return the newest version of an op in ``opset``, or None."""
        versions = self._of_type(op_type)
        opsets = [since for since in versions if since <= opset]
        return versions[max(opsets)] if opsets else None

    def get(self, op_type: str, opset: Opset) -> Version:
        """Return the newest version of an op in ``opset``.

        Raises:
            UnsupportedOpError: There is no version; names the first later opset with one.
        """
        version = self.find(op_type, opset)
        if version is None:
            raise UnsupportedOpError(self.missing(op_type, opset), got=op_type)
        return version

    def missing(self, op_type: str, opset: Opset) -> str:
        """Return the reason why ``find`` returns None."""
        reason = f"no {self._noun} in opset {opset.mil_name}"
        versions = self._of_type(op_type)
        return f"{reason}, only since {min(versions).mil_name}" if versions else reason

    def __iter__(self) -> Iterator[Version]:
        """Yield every version of every op, sorted by op type and opset."""
        _ = self.families
        for op_type in sorted(self._versions):
            versions = self._versions[op_type]
            yield from (versions[since] for since in sorted(versions))

    def _of_type(self, op_type: str) -> dict[Opset, Version]:
        _ = self.families
        return self._versions.get(op_type, {})
