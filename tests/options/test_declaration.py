"""Every declared option: its check, documentation, signature, flag and recipe key."""

from __future__ import annotations

import argparse
import inspect
import pydoc
import re
from dataclasses import MISSING, fields
from typing import Any

import pytest
from options import option_tables

from coreml_delegate import CompileOptions, CoreMLBackend, CoreMLPartitioner
from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import flag, positive
from coreml_delegate.options.declaration import (
    Argument,
    Option,
    option,
    option_class,
    options_of,
    takes,
)
from coreml_delegate.options.engine_options import EngineOptions
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.recipes import CoreMLRecipeProvider, CoreMLRecipeType
from coreml_delegate.scripts.arguments import add_options, keywords_of
from coreml_delegate.scripts.cli import main_parser

CALLABLES = {
    CompileOptions: CoreMLBackend.generate_compile_specs,
    PartitionerKeywords: CoreMLPartitioner,
    EngineOptions: EngineOptions,
}
"""The functions that take the options of a dataclass as keywords."""
COMMANDS = {
    CompileOptions: ["export", "module:factory", "--dry-run"],
    PartitionerKeywords: ["export", "module:factory", "--dry-run"],
    EngineOptions: ["run", "x.pte"],
}


def _options(has: Any = lambda option: True) -> list[Any]:
    return [
        pytest.param(kind, declared, id=f"{kind.__name__}.{declared.name}")
        for kind in CALLABLES
        for declared in options_of(kind)
        if has(declared)
    ]


EVERY = pytest.mark.parametrize(("kind", "declared"), _options())
ON_THE_COMMAND_LINE = pytest.mark.parametrize(
    ("kind", "declared"), _options(lambda declared: declared.argument is not None)
)


def _callable_with(kind: Any, keyword: str) -> Any:
    """The callable that takes a keyword: for all options of the dataclass, or for this one."""
    candidates = [CALLABLES[kind], *vars(CoreMLBackend.__mro__[1]).values()]
    for function in candidates:
        function = getattr(function, "__func__", function)
        if callable(function) and keyword in inspect.signature(function).parameters:
            return function
    raise LookupError(keyword)


def _refusal(function: Any, *args: Any, **keywords: Any) -> str:
    with pytest.raises(OptionError) as raised:
        function(*args, **keywords)
    return str(raised.value)


@EVERY
def test_every_option_has_documentation_and_accepts_its_default(
    kind: Any, declared: Option
) -> None:
    assert re.fullmatch(r"[A-Z`].*\.", declared.doc, re.DOTALL)
    if declared.default is not MISSING:
        assert declared.check(declared.keyword, declared.default) == declared.default


@pytest.mark.parametrize("kind", CALLABLES)
def test_names_are_distinct(kind: Any) -> None:
    options = options_of(kind)
    assert [declared.name for declared in options] == [field.name for field in fields(kind)]
    assert len({declared.keyword for declared in options}) == len(options)
    flags = [declared.argument.flag for declared in options if declared.argument is not None]
    assert len(set(flags)) == len(flags)


@EVERY
def test_users_see_every_option_with_its_default(kind: Any, declared: Option) -> None:
    function = _callable_with(kind, declared.keyword)
    parameter = inspect.signature(function).parameters[declared.keyword]
    if function is CALLABLES[kind] and declared.default is not MISSING:
        check = declared.check
        assert check(declared.keyword, parameter.default) == declared.default
        shown = pydoc.plain(pydoc.render_doc(function))
        assert f"{declared.keyword}: {declared.doc[:30]}" in shown


@EVERY
def test_wrong_values_are_refused_in_python(kind: Any, declared: Option) -> None:
    expected = _refusal(declared.check, declared.keyword, wrong := object())
    function = CALLABLES[kind]
    if declared.keyword not in inspect.signature(function).parameters:
        function, keyword = kind, declared.name
    else:
        keyword = declared.keyword
    assert _refusal(function, **{keyword: wrong}) == expected


@ON_THE_COMMAND_LINE
def test_flags_give_the_values(kind: Any, declared: Option) -> None:
    argument = declared.argument
    assert argument is not None
    args = main_parser().parse_args(COMMANDS[kind])
    assert keywords_of(args, kind)[declared.keyword] == declared.default
    if declared.default is False:
        args = main_parser().parse_args([*COMMANDS[kind], argument.flag])
        assert keywords_of(args, kind)[declared.keyword] is True
    for text, value in (argument.choices or {}).items():
        args = main_parser().parse_args([*COMMANDS[kind], argument.flag, text])
        assert keywords_of(args, kind)[declared.keyword] is value


@ON_THE_COMMAND_LINE
def test_wrong_values_are_refused_on_the_command_line(
    kind: Any, declared: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    argument = declared.argument
    assert argument is not None
    wrong = "=nothing of this name"
    if declared.default is False:  # takes no value
        given, expected = [f"{argument.flag}=3"], "ignored explicit argument '3'"
    elif argument.is_repeatable:  # text is accepted; of modules only the program knows the names
        args = main_parser().parse_args([*COMMANDS[kind], argument.flag, "a", argument.flag, "b"])
        assert keywords_of(args, kind)[declared.keyword] == ["a", "b"]
        return
    else:
        given = [argument.flag, wrong]
        expected = _refusal(
            lambda: declared.check(declared.keyword, argument.value_of(declared.keyword, wrong))
        )
    with pytest.raises(SystemExit) as raised:
        main_parser().parse_args([*COMMANDS[kind], *given])
    assert raised.value.code == 2
    assert f"argument {argument.flag}: {expected}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality:Warning")
@pytest.mark.parametrize(("kind", "declared"), _options(lambda declared: declared.is_in_recipes))
def test_wrong_values_are_refused_in_recipes(kind: Any, declared: Option) -> None:
    create = CoreMLRecipeProvider().create_recipe
    expected = _refusal(CALLABLES[kind], **{declared.keyword: (wrong := object())})
    assert _refusal(create, CoreMLRecipeType.FP16, **{declared.keyword: wrong}) == expected
    assert f"{declared.keyword}: {declared.doc[:30]}" in str(create.__doc__)
    if declared.default is not None:
        assert create(CoreMLRecipeType.FP16, **{declared.keyword: declared.default}) is not None


@pytest.mark.parametrize("page", sorted({page for page, _ in option_tables.TABLES}))
def test_the_tables_of_the_documentation_are_of_today(page: str) -> None:
    text = (option_tables.DOCS / page).read_text()
    assert option_tables.pages()[page] == text, "run python -m tests.options.option_tables"


# A new option


@option_class(kw_only=True)
class Example:
    """Options of the example.

    Attributes:
        options: See the fields.
    """

    rounds: int = option(
        default=3, check=positive, doc="Number of rounds.", argument=Argument("--rounds", parse=int)
    )
    is_checked: bool = option(
        default=True, check=flag, doc="Whether to check.", argument=Argument("--unchecked")
    )


class Worker:
    @takes(Example, Example)
    def work(self, options: Example) -> int:
        """Work.

        Args:
            options: See ``Example``.
        """
        return options.rounds


def test_a_field_is_all_that_an_option_needs() -> None:
    assert "rounds: Number of rounds." in str(Example.__doc__)
    assert "rounds: Number of rounds." in str(Worker.work.__doc__)
    signature = "(*, rounds: 'int' = 3, is_checked: 'bool' = True) -> 'int'"
    assert str(inspect.signature(Worker().work)) == signature
    assert Worker().work(rounds=2) == 2
    assert "rounds must be positive" in _refusal(Worker().work, rounds=0)
    parser = argparse.ArgumentParser()
    add_options(parser, Example)
    assert keywords_of(parser.parse_args([]), Example) == {"rounds": 3, "is_checked": True}
    args = parser.parse_args(["--rounds", "2", "--unchecked"])
    assert keywords_of(args, Example) == {"rounds": 2, "is_checked": False}
