"""The declaration of an option: one field of a dataclass, which drives every form of the option.

``option`` makes the field, ``option_class`` the dataclass, which checks and converts its values.
``takes`` gives a method the fields as keywords, ``documented`` writes them into docstrings. The
command line, the recipes and the tables in ``docs/`` read ``options_of``.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar, dataclass_transform

from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import Check, one_of

PLACEHOLDER = re.compile(r"^( *)(?:options|\*\*kwargs): See .*(?:\n\1 +.*)*", re.MULTILINE)
"""The lines of a docstring in place of which the options are written."""

_METADATA = "option"
_WIDTH = 100  # columns of a docstring

_Object = TypeVar("_Object", bound=Any)
_Options = TypeVar("_Options")
_Owner = TypeVar("_Owner")
_Result = TypeVar("_Result")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Argument:
    """The command-line form of an option; the flag of a bool takes no value, and inverts it.

    Attributes:
        flag: ``--strict``.
        help: Help text; None for the first sentence of the documentation.
        metavar: Name of the value; None to list the choices.
        parse: Function of the text that returns the value.
        choices: The values by their texts, or None for ``parse``.
        is_repeatable: Whether every use of the flag adds an item to a list.
        dest: Attribute of the parsed arguments; None for the flag's name.
    """

    flag: str
    help: str | None = None
    metavar: str | None = None
    parse: Callable[[str], object] = str
    choices: Mapping[str, object] | None = None
    is_repeatable: bool = False
    dest: str | None = None

    @property
    def attribute(self) -> str:
        """The attribute of the parsed arguments."""
        return self.dest or self.flag[2:].replace("-", "_")

    def value_of(self, name: str, text: str) -> object:
        """Return the value for a text; the text itself if only a check can refuse it.

        Raises:
            OptionError: The text is none of the choices, or not parsed; ``name`` is the option's.
        """
        if self.choices is not None:
            return one_of(self.choices)(name, text)
        try:
            return self.parse(text)
        except OptionError:
            raise
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class SpecForm:
    """The compile spec of an option.

    Attributes:
        key: Key of the compile spec.
        encode: Function of the value that returns the text; None for no spec.
        decode: Takes the spec's name for messages, and its text; the option's check follows.
    """

    key: str
    encode: Callable[[Any], str | None]
    decode: Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option by its field.

    Attributes:
        name: Name of the field.
        default: Default value; ``dataclasses.MISSING`` if a function computes it.
        check: Returns the value in the form in which the field has it.
        doc: Documentation, in the form of a docstring.
        keyword: Name of the keyword that sets the option, which messages use.
        argument: Command-line form, or None.
        is_in_recipes: Whether the recipes take the keyword.
        spec: Compile spec, or None.
        leaves_calls: Whether a value leaves calls to the CPU; None if no value does.
    """

    name: str
    default: Any
    check: Check
    doc: str
    keyword: str
    argument: Argument | None = None
    is_in_recipes: bool = False
    spec: SpecForm | None = None
    leaves_calls: Callable[[Any], object] | None = None


def option(*, default: Any = MISSING, factory: Any = MISSING, **declaration: Any) -> Any:
    """Return the field of an option; ``declaration`` has the attributes of its ``Option``."""
    return field(default=default, default_factory=factory, metadata={_METADATA: declaration})


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def option_class(
    *, kw_only: bool = False, slots: bool = True
) -> Callable[[type[_Object]], type[_Object]]:
    """Return a decorator for a frozen dataclass with fields of ``option``, which are checked."""

    def decorate(kind: type[_Object]) -> type[_Object]:
        if not hasattr(kind, "__post_init__"):
            kind.__post_init__ = check_fields
        kind = dataclass(frozen=True, kw_only=kw_only, slots=slots)(kind)
        return documented(options_of(kind), by_name=True)(kind)

    return decorate


@functools.cache
def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """Return the options of a dataclass, in the order of the fields."""
    declared: list[dict[str, Any]] = [
        {"name": f.name, "keyword": f.name, "default": f.default, **f.metadata[_METADATA]}
        for f in fields(kind)
    ]
    return tuple(Option(**attributes) for attributes in declared)


def check_fields(options: Any) -> None:
    """Check the values of an instance of a frozen dataclass, and convert them.

    Raises:
        OptionError: A value is not accepted.
    """
    for declared in options_of(type(options)):
        value = declared.check(declared.keyword, getattr(options, declared.name))
        object.__setattr__(options, declared.name, value)


def checked(kind: type[Any], name: str, value: Any) -> Any:
    """Return a value in the form in which an option of a dataclass has it.

    Args:
        kind: The dataclass.
        name: Name of the option's field.
        value: The user's value.

    Raises:
        OptionError: The value is not accepted.
    """
    (declared,) = (option for option in options_of(kind) if option.name == name)
    return declared.check(declared.keyword, value)


def documented(options: Iterable[Option], *, by_name: bool = False) -> Callable[[_Object], _Object]:
    """Return a decorator that writes options, by keyword or by name, into a docstring."""
    texts = [f"{o.name if by_name else o.keyword}: {o.doc}" for o in options]

    def write(match: re.Match[str]) -> str:
        indent = match[1]
        wrap = functools.partial(textwrap.fill, width=_WIDTH, break_on_hyphens=False)
        lines = (
            wrap(text, initial_indent=indent, subsequent_indent=f"{indent}    ") for text in texts
        )
        return "\n".join(lines)

    def decorate(target: _Object) -> _Object:
        target.__doc__ = PLACEHOLDER.sub(write, target.__doc__ or "")
        return target

    return decorate


def takes(
    make: Callable[_P, _Options], kind: type[_Options]
) -> Callable[[Callable[[_Owner, _Options], _Result]], Callable[Concatenate[_Owner, _P], _Result]]:
    """Return a decorator for a method of one argument, the options, which callers pass as keywords.

    Args:
        make: Returns the options for the arguments of a call; its signature becomes the method's.
        kind: The dataclass of the options, for the documentation.
    """
    declared = {option.keyword: option for option in options_of(kind)}
    parameters = inspect.signature(make).parameters

    def decorate(
        method: Callable[[_Owner, _Options], _Result],
    ) -> Callable[Concatenate[_Owner, _P], _Result]:
        own = inspect.signature(method)
        owner = next(iter(own.parameters.values()))

        @functools.wraps(method)
        def call(this: _Owner, *args: _P.args, **keywords: _P.kwargs) -> _Result:
            return method(this, make(*args, **keywords))

        call.__dict__["__signature__"] = own.replace(parameters=[owner, *parameters.values()])
        return documented(declared[name] for name in parameters)(call)

    return decorate
