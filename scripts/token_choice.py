"""Options of ``generate`` that choose the next token: sampling, penalties and grammars."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import add_number, add_path

if TYPE_CHECKING:
    from coreml_delegate.llm.layout import Layout
    from coreml_delegate.llm.sampling import Sampler

_EXTRA = "needs the extra coreml-delegate[grammar]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_argument_group("choice of tokens")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divides the logits; 0, the default, takes the most probable token",
    )
    add_number(group, "--top-k", "K", "draw from the K most probable tokens")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest most probable tokens whose probabilities sum to P",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens whose probability is at least P times the largest",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="divide the positive logits of tokens of the text by R, multiply the negative ones",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="A",
        help="subtract A from the logits of tokens that were generated",
    )
    group.add_argument(
        "--logprobs",
        type=arguments.natural,
        metavar="K",
        help="with --json: the logarithm of each token's probability, and of the K most probable "
        "tokens, before penalties, grammar and temperature",
    )
    arguments.add_seed(parser, "the draws")
    _add_grammars(parser)


def _add_grammars(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "form of the text", f"each {_EXTRA}; the text ends where no longer text has the form"
    )
    rules = group.add_mutually_exclusive_group()
    rules.add_argument("--json-object", action="store_true", help="a JSON object")
    add_path(rules, "--json-schema", "FILE", "JSON that a JSON schema describes")
    rules.add_argument("--regex", metavar="PATTERN", help="a match of a regular expression")
    add_path(rules, "--lark", "FILE", "a text of a grammar in Lark's syntax, from the rule start")


def refused_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options that ExecuTorch's runner lacks; an option in use has a true value."""
    return {
        "--top-k": args.top_k,
        "--top-p": args.top_p != 1,
        "--min-p": args.min_p,
        "--repetition-penalty": args.repetition_penalty != 1,
        "--presence-penalty": args.presence_penalty,
        "--logprobs": args.logprobs is not None,
        "--seed": args.seed,
        "--json-object": args.json_object,
        "--json-schema": args.json_schema,
        "--regex": args.regex is not None,
        "--lark": args.lark,
    }


def check_usage(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, as wrong usage."""
    if args.logprobs is not None and (args.chat or not args.json):
        args.refuse_usage("--logprobs needs --json, and does not go with --chat")
    if _has_form(args) and args.stop:
        args.refuse_usage("--stop does not go with --json-object, --json-schema, --regex or --lark")


def rule_of(args: argparse.Namespace) -> str | None:
    """Return the rule of the text's form; None without one.

    Raises:
        OptionError: A file is missing, the library does not know the form, or is not installed.
    """
    if not _has_form(args):
        return None
    from coreml_delegate.llm import grammar

    if args.regex is not None:
        return grammar.regex_rule(args.regex)
    if args.lark is not None:
        return grammar.lark_rule(arguments.read_text(args.lark))
    schema = None if args.json_schema is None else arguments.read_text(args.json_schema)
    return grammar.json_rule(schema)


def sampler_of(
    args: argparse.Namespace, rule: str | None, layout: Layout, tokenizer: Path | None
) -> Sampler:
    """Return the sampler of a model.

    Args:
        args: The arguments.
        rule: Result of ``rule_of``.
        layout: Of the model.
        tokenizer: ``tokenizer.json`` or its folder; None if the tokens are bytes.

    Raises:
        OptionError: A setting is out of range, or the tokenizer cannot be read.
    """
    from coreml_delegate.llm.grammar import Grammar
    from coreml_delegate.llm.sampling import Sampler, Sampling

    settings = Sampling(
        args.temperature,
        args.top_k,
        args.top_p,
        args.seed,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
    )
    grammar = None
    if rule is not None:
        grammar = Grammar(rule, tokenizer, vocabulary=layout.vocabulary)
    return Sampler(settings, logprobs=args.logprobs, grammar=grammar)


def warn_of_incomplete_text(args: argparse.Namespace, ending: str | None) -> None:
    """Warn if a text was cut off before it has its form."""
    if _has_form(args) and ending in ("limit", "context"):
        console.warn("the text is cut off, so it may not have the form")


def _has_form(args: argparse.Namespace) -> bool:
    forms = (args.json_schema, args.regex, args.lark)
    return args.json_object or any(form is not None for form in forms)
