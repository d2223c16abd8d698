"""Arguments that several commands share, and parsers of values. Imports nothing slow."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.files import new_file, new_folder
from coreml_delegate.formats.mlpackage import SUFFIX, empty_folders
from coreml_delegate.options.checks import values_of
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.declaration import Argument, Option, options_of
from coreml_delegate.options.engine_options import EngineOptions
from coreml_delegate.scripts import interruption

PRECISIONS = tuple(values_of(Precision))
# Copies, because importing the engines takes seconds; a test compares them.
ENGINES = ("auto", "coreml", "openvino", "reference")
HOSTS = ("auto", "python", "stock")
_LARGEST = 2**63 - 1

SAMPLES = 4
"""Number of random inputs to compare on, unless ``--samples`` gives one."""

TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")
"""Files of a checkpoint that ExecuTorch's runners read as its tokenizer, best first."""

EXTERNAL_SUFFIX = ".ptd"
"""Suffix of external data of a ``.pte``."""

BUNDLE_SUFFIX = ".bpte"
"""Suffix of programs that are bundled with inputs and outputs."""

MODEL_LIBRARIES = ("torchvision", "timm")
"""Libraries whose models are named ``LIBRARY:NAME``."""

_SOURCE_HELP = (
    "torchvision:NAME or timm:NAME; or MODULE:FACTORY, where MODULE may be in the current folder "
    "and FACTORY() returns (nn.Module, example_inputs) with a tensor, a tuple or a dict of keyword "
    "inputs, or (nn.Module, args, kwargs), or an nn.Module (then pass --input-shape); or FILE.pt2 "
    "of torch.export.save"
)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare SOURCE and the options for its weights and inputs."""
    parser.add_argument("source", metavar="SOURCE", help=_SOURCE_HELP)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="state dict to load: .pt of torch.save, or .safetensors (default: random weights)",
    )
    parser.add_argument(
        "--input-shape",
        type=shape,
        action="append",
        default=[],
        metavar="N,C,H,W",
        help="shape of one float32 input, repeatable (default: the source's own example inputs)",
    )
    add_seed(parser, "random weights and inputs")


def add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare ``--seed``."""
    parser.add_argument("--seed", type=seed, default=0, help=f"seed of {what} (default: 0)")


def add_allow_missing_kernels(parser: argparse.ArgumentParser) -> None:
    """Declare ``--allow-missing-kernels``."""
    parser.add_argument(
        "--allow-missing-kernels",
        action="store_true",
        help="exit with 0, and not 3, if ExecuTorch's runtime lacks kernels for operations that "
        "stay on the CPU, for apps that register them",
    )


def add_options(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage] - groups have no public type
    kind: type[Any],
    names: Collection[str] | None = None,
) -> None:
    """Declare the arguments of options.

    Args:
        parser: Gets the arguments.
        kind: The dataclass of the options.
        names: Names of its options; None for all that have a command-line form.
    """
    for option in options_of(kind):
        if option.argument is not None and (names is None or option.name in names):
            argument = option.argument
            form = _form(option, argument)
            parser.add_argument(argument.flag, dest=argument.attribute, **form)


def keywords_of(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the values of the declared arguments of ``add_options``, by keyword."""
    return {
        option.keyword: getattr(args, option.argument.attribute)
        for option in options_of(kind)
        if option.argument is not None and hasattr(args, option.argument.attribute)
    }


def _form(option: Option, argument: Argument) -> dict[str, Any]:
    """Return the keywords of ``add_argument``."""
    default = option.default
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        return {"action": action, "help": _meaning(option, argument)}

    def parse(text: str) -> Any:
        try:
            value = argument.value_of(option.keyword, text)
            return value if argument.is_repeatable else option.check(option.keyword, value)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return {
        "type": parse,
        "action": "append" if argument.is_repeatable else "store",
        # A text, for the help, which argparse parses.
        "default": None if default is None else str(getattr(default, "value", default)),
        "metavar": argument.metavar or f"{{{','.join(argument.choices or ())}}}",
        "help": _meaning(option, argument),
    }


def _meaning(option: Option, argument: Argument) -> str:
    """Return the help text, by default the first sentence of the documentation."""
    text = argument.help or re.split(r"[.;:] ", f"{option.doc} ")[0].replace("`", "")
    text = text if text[1].isupper() else text[0].lower() + text[1:]
    of_none = re.search(r"None for (.*?)[.;] ", f"{option.doc} ")
    if option.default is None:
        text += f" (default: {of_none[1]})" if of_none else ""
    elif not isinstance(option.default, bool):
        text += " (default: %(default)s)"
    return f"{text}; repeatable" if argument.is_repeatable else text


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare PROGRAM."""
    parser.add_argument(
        "program",
        type=Path,
        metavar="PROGRAM",
        help=".pte, .mlpackage, or StableHLO (.mlir, .stablehlo, .jax)",
    )


def add_execution(parser: argparse.ArgumentParser, *, judging: bool = False) -> None:
    """Declare ``--method`` and the options of ``add_engine``."""
    add_engine(parser, judging=judging)
    add_method(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Declare ``--data``."""
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.ptd",
        help="external data of a .pte, repeatable",
    )


_SETS = (
    "a folder of images (.png, .jpg) or arrays (.npy, .npz, .safetensors), or a folder of such "
    "folders, one for each class; a file with an array for each input, and labels if they are "
    "known; or MODULE:FACTORY, which returns samples to iterate over"
)


def add_data_set(parser: argparse.ArgumentParser, *, external: bool = False) -> None:
    """Declare ``--data`` for samples to compare on, and ``--samples``.

    Args:
        parser: Gets the arguments.
        external: Whether ``--data`` takes external data of a ``.pte`` as well; see
            ``split_data``.
    """
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DATA",
        help=f"data to compare on, read one by one: {_SETS}"
        + ("; or FILE.ptd, external data of a .pte, repeatable" if external else ""),
    )
    parser.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="read at most N samples of --data (default: all); without --data, compare on N inputs "
        f"like the example (default: {SAMPLES})",
    )


def split_data(values: Sequence[str]) -> tuple[str | None, list[Path]]:
    """Return the data set among the values of ``--data``, and the external data of a ``.pte``.

    Raises:
        OptionError: There are two data sets.
    """
    external = [Path(value) for value in values if value.endswith(EXTERNAL_SUFFIX)]
    sets = [value for value in values if not value.endswith(EXTERNAL_SUFFIX)]
    if len(sets) > 1:
        raise OptionError("--data names two data sets", got=", ".join(sets), expected="one")
    return (sets[0] if sets else None), external


def add_engine(parser: argparse.ArgumentParser, *, judging: bool = False) -> None:
    """Declare engine, host and engine options.

    Args:
        parser: Gets the arguments.
        judging: Whether the program is run for its accuracy; then the default is None, and the
            types of the program decide the engine.
    """
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=None if judging else "auto",
        help="engine that runs the Core ML parts (default: reference for a program that computes "
        "in fp16, auto for others)"
        if judging
        else "engine that runs the Core ML parts (default: auto)",
    )
    parser.add_argument(
        "--host",
        choices=HOSTS,
        default="auto",
        help="runner of the other parts of a .pte: torch's kernels (python), ExecuTorch's own "
        "runtime (stock), or python unless only stock can (auto, the default)",
    )
    add_options(parser, EngineOptions)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tokenizer``; see ``tokenizer_of``."""
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE|FOLDER",
        help="tokenizer.json of the model, or its folder (default: the copy that export-llm has "
        "put beside the program; without one, tokens are bytes)",
    )


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OptionError: It is not in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not a text in UTF-8", got=str(error)) from error


def tokenizer_of(args: argparse.Namespace) -> Path | None:
    """Return the path of a language model's tokenizer; None if its tokens are bytes."""
    copy = beside(args.program, TOKENIZERS[0])
    return args.tokenizer or (copy if copy.is_file() else None)


def add_method(parser: argparse.ArgumentParser) -> None:
    """Declare ``--method``."""
    parser.add_argument("--method", help="method of the program (default: forward)")


def add_inputs(parser: argparse.ArgumentParser, *, default: str = "random") -> None:
    """Declare ``--input``; ``default`` says which inputs there are without it."""
    parser.add_argument(
        "--input",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="one input per file, in order (.npy, .png, .jpg), or several in a .npz; default: "
        f"{default}. Images are resized, cropped and normalised as for ImageNet",
    )


def add_min_sqnr(parser: argparse.ArgumentParser) -> None:
    """Declare ``--min-sqnr``."""
    parser.add_argument(
        "--min-sqnr",
        type=decibels,
        default=30.0,
        metavar="DB",
        help="fail below this ratio of signal to error, in dB, for any output (default: 30)",
    )


def add_samples(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    """Declare ``--samples``."""
    parser.add_argument(
        "--samples",
        type=positive,
        default=SAMPLES,
        help=f"random inputs{of} (default: {SAMPLES})",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def add_force(parser: argparse.ArgumentParser) -> None:
    """Declare ``--force``."""
    parser.add_argument("--force", action="store_true", help="replace outputs that exist")


def check_output(path: Path, *, force: bool, is_folder: bool = False) -> None:
    """Refuse an output path before the work whose result could not be written.

    Raises:
        OptionError: Its folder does not exist, it is no regular file or not the folder that it
            should be, or it exists and ``force`` is false.
    """
    if not path.parent.is_dir():
        raise OptionError("no such folder for the output", got=str(path.parent))
    if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
        kind = "folder" if is_folder else "regular file"
        raise OptionError(f"output is not a {kind}", got=str(path))
    if path.exists() and not force:
        raise OptionError("output exists", got=str(path), remedy="Pass --force to replace it")


def beside(program: Path, name: str) -> Path:
    """Return the path of a file that belongs to a program: ``model.tokenizer.json``."""
    return program.with_name(f"{program.stem}.{name}")


def check_outputs(paths: Iterable[Path | None], *, force: bool) -> None:
    """Check output paths, except None; see ``check_output``.

    Raises:
        OptionError: One is refused, or two are the same file.
    """
    seen: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        check_output(path, force=force, is_folder=path.suffix == SUFFIX)
        if path.resolve() in seen:
            raise OptionError("two outputs are the same file", got=str(path))
        seen.add(path.resolve())


@contextmanager
def new_output(path: Path, *, force: bool) -> Generator[BinaryIO]:
    """Open an output file that takes the name ``path`` when the block ends without an exception.

    Args:
        path: The user's output path.
        force: Replace a file that is already there, even if it came after the first check.

    Raises:
        OptionError: See ``check_output``.
    """
    check_output(path, force=force)
    with new_file(path) as file:
        yield file
        interruption.check()
        check_output(path, force=force)


@contextmanager
def new_package(files: Mapping[str, Buffer], path: Path, *, force: bool) -> Generator[None]:
    """Write an ``.mlpackage`` that appears when the block ends without an exception.

    Args:
        files: Content by path in the package.
        path: The user's output path.
        force: Replace a package that is already there, even if it came after the first check.

    Raises:
        OptionError: See ``check_output``.
    """
    check_output(path, force=force, is_folder=True)
    with new_folder(files, path, folders=empty_folders(files), overwrite=True):
        yield
        interruption.check()
        check_output(path, force=force, is_folder=True)


def integer(what: str, low: int, high: int = _LARGEST) -> Callable[[str], int]:
    """Return a parser of integers from ``low`` to ``high``, called ``what`` in messages."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return parse


natural = integer("a natural number of 64 bits", 0)
"""Parse an integer of at least 0."""

positive = integer("a positive integer of 64 bits", 1)
"""Parse an integer of at least 1."""

seed = integer("an integer of 64 bits, signed or unsigned", -_LARGEST - 1, 2 * _LARGEST + 1)
"""Parse a seed that torch accepts."""


def decibels(text: str) -> float:
    """Parse a finite or infinite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def shape(text: str) -> tuple[int, ...]:
    """Parse ``1,3,224,224``."""
    try:
        return tuple(map(positive, text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1,3,224,224") from None


def add_report(parser: argparse.ArgumentParser, forms: Collection[str], *, what: str) -> None:
    """Declare ``--report``: files that get ``what`` in the format of their suffix."""
    *first, last = sorted(forms)
    parser.add_argument(
        "--report",
        type=_path_with_suffix(forms),
        action="append",
        default=[],
        metavar="FILE",
        help=f"also write {what}, in the format of the suffix: {', '.join(first)} or {last}; "
        "repeatable",
    )


def _path_with_suffix(suffixes: Collection[str]) -> Callable[[str], Path]:
    """Return a parser of file names that end in one of ``suffixes``."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(suffixes)}")
        return path

    return parse
