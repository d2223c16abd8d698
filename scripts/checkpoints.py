"""Commands that make a ``.pte`` of a checkpoint of ``transformers``: arguments, files, summary."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.formats.text import decibels
from coreml_delegate.options.declaration import options_of
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import new_output

if TYPE_CHECKING:
    from coreml_delegate.partition import CoreMLPartitioner, DelegationReport


def add_checkpoint(parser: argparse.ArgumentParser, libraries: str, alternatives: str = "") -> None:
    """Declare the checkpoint, ``--random``, ``--seed`` and ``--output``.

    Args:
        parser: The parser of the command.
        libraries: Libraries that save such checkpoints, with a verb.
        alternatives: Checkpoints that are no folders, after a comma.
    """
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        nargs="?",
        help=f"folder with a config.json and *.safetensors, as {libraries}{alternatives}",
    )
    parser.add_argument(
        "--random",
        type=Path,
        metavar="CONFIG.json",
        help="instead of a checkpoint: a configuration that gets random weights",
    )
    arguments.add_seed(parser, "random weights")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.pte")


def add_lowering(parser: argparse.ArgumentParser, without: Collection[str] = frozenset()) -> None:
    """Declare how the methods are lowered: ``CompileOptions`` except some, and ``--min-sqnr``."""
    arguments.add_allow_missing_kernels(parser)
    names = {option.name for option in options_of(CompileOptions)} - set(without)
    arguments.add_options(parser, CompileOptions, names)
    arguments.add_options(parser, PartitionerKeywords, ("min_sqnr_db",))


def check_usage(args: argparse.Namespace) -> None:
    """Check that there is a checkpoint or a configuration; otherwise exit with the usage."""
    if (args.checkpoint is None) == (args.random is None):
        args.refuse_usage("exactly one is required: CHECKPOINT, or --random CONFIG.json")


def config_path(args: argparse.Namespace) -> Path:
    """Return the path of the configuration.

    Raises:
        OptionError: The checkpoint does not exist.
    """
    from coreml_delegate.llm.checkpoint import config_file

    return args.random if args.checkpoint is None else config_file(args.checkpoint)


def tokenizer_copy(args: argparse.Namespace) -> dict[Path, Callable[[], bytes]]:
    """Return the path for a copy of the tokenizer, with its reader, or nothing.

    It lies in the folder of the checkpoint or of the configuration.
    """
    folder: Path = args.random.parent if args.checkpoint is None else args.checkpoint
    if folder.suffix.lower() == ".gguf":
        return {arguments.beside(args.output, arguments.TOKENIZERS[0]): partial(_read_gguf, folder)}
    sources = (folder / name for name in arguments.TOKENIZERS)
    source = next((source for source in sources if source.is_file()), None)
    copied = source and {arguments.beside(args.output, source.name): source.read_bytes}
    return copied or {}


def _read_gguf(path: Path) -> bytes:
    from coreml_delegate.llm.gguf import gguf_tokenizer

    return gguf_tokenizer(path)


def write(
    args: argparse.Namespace,
    program: Any,
    copies: Mapping[Path, Callable[[], bytes]],
    reports: Iterable[DelegationReport],
) -> None:
    """Write a program, and copies of files by their paths.

    Args:
        args: Arguments with ``output`` and ``force``.
        program: ExecuTorch's program manager.
        copies: Functions that read them, by path.
        reports: Delegation reports, by method.

    Raises:
        PrecisionError: A method misses ``--min-sqnr`` with ``--precision auto``, without
            ``--force``.
    """
    if not args.force:
        for report in reports:
            report.require_precision()
    contents = {path: read() for path, read in copies.items()}
    with new_output(args.output, force=args.force) as file:
        program.write_to_file(file)
    for path, content in contents.items():
        with new_output(path, force=args.force) as file:
            file.write(content)


def partitioner(args: argparse.Namespace, **keywords: Any) -> CoreMLPartitioner:
    """Return the partitioner of the arguments of ``add_lowering``.

    Args:
        args: The arguments.
        keywords: Further keywords of ``CoreMLBackend.generate_compile_specs``.
    """
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.partition import CoreMLPartitioner

    keywords = {**arguments.keywords_of(args, CompileOptions), **keywords}
    specs = CoreMLBackend.generate_compile_specs(**keywords)
    return CoreMLPartitioner(compile_specs=specs, min_sqnr_db=args.min_sqnr)


def report(
    args: argparse.Namespace,
    facts: Mapping[str, Any],
    rows: Iterable[tuple[str, str]],
    reports: Mapping[str, DelegationReport],
) -> None:
    """Print a summary; warn of methods that Core ML does not compute entirely.

    Args:
        args: Arguments with ``output`` and ``json``.
        facts: About the model, for ``--json``.
        rows: The facts as rows of a table.
        reports: Delegation reports, by method.
    """
    size, methods = args.output.stat().st_size, methods_document(reports)
    if args.json:
        console.write_json({**facts, "bytes": size, "methods": methods})
    else:
        console.write(
            console.columns([*rows, *methods_rows(methods), ("file", console.size(size))])
        )
    for name, report in reports.items():
        if _left_on_cpu(report):
            warn_of_cpu(name, report)


def _left_on_cpu(report: DelegationReport) -> bool:
    """Whether calls stay on the CPU that Core ML should compute.

    In a method that has a module for Core ML these are only the calls of that module.
    """
    from coreml_delegate.llm.decoder_methods import is_core_ml

    has_module = any(is_core_ml(node.module) for node in report.nodes)
    return any(is_core_ml(node.module) or not has_module for node in report.undelegated)


def methods_document(reports: Mapping[str, DelegationReport]) -> dict[str, dict[str, Any]]:
    """Return the numbers of operations of each method, for ``--json``."""
    return {
        name: {
            "operations": len(report.nodes),
            "delegated": len(report.delegated),
            "partitions": len(report.partitions),
            "on_the_cpu": sorted({node.op for node in report.undelegated}),
            "precision": None if report.precision is None else report.precision.to_dict(),
        }
        for name, report in reports.items()
    }


def methods_rows(document: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield the lines of a summary for ``methods_document``."""
    for name, facts in document.items():
        yield name, "{delegated} of {operations} operations on Core ML".format(**facts)
        if (precision := facts["precision"]) is not None:
            count = sum(len(island["nodes"]) for island in precision["islands"])
            # Without islands the ratio after is that of a program in fp32, which is not written.
            before, after = decibels(precision["before_db"]), decibels(precision["after_db"])
            text = f"{after if count else before} on the example inputs"
            text += f", {count} operation(s) in fp32 ({before} without)" if count else ""
            yield "", text + ("" if precision["is_reached"] else ", below the target")


def warn_of_cpu(name: str, report: DelegationReport) -> None:
    """Warn that a method does not run entirely on Core ML, with the table of its report."""
    console.warn(f"{name} does not run entirely on Core ML")
    console.write(report.to_table())


def require_kernels(args: argparse.Namespace, reports: Iterable[DelegationReport]) -> None:
    """Refuse programs that ExecuTorch's runtime cannot run, unless ``--allow-missing-kernels``."""
    if not args.allow_missing_kernels:
        for report in reports:
            report.require_kernels()
