"""``coreml-delegate export``: from a PyTorch model to a ``.pte`` with Core ML delegates."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.command import Command
from coreml_delegate.scripts.output_file import check_output, new_file

if TYPE_CHECKING:
    from coreml_delegate.partition import CoreMLPartitioner, DelegationReport

_FORMS: Mapping[str, Callable[[DelegationReport], str]] = {
    ".html": lambda report: report.to_html(),
    ".json": lambda report: f"{report.to_json()}\n",
    ".txt": lambda report: f"{report.to_table()}\n",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.pte", help="required without --dry-run"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="report what would be delegated, without lowering; nothing but --report is written",
    )
    parser.add_argument(
        "--compute-unit",
        choices=arguments.COMPUTE_UNITS,
        default="all",
        help="where the device may run it (default: all)",
    )
    parser.add_argument(
        "--precision",
        choices=arguments.PRECISIONS,
        default="float16",
        help="what Core ML computes in (default: float16)",
    )
    parser.add_argument(
        "--deployment-target",
        type=arguments.deployment_target,
        metavar="iOS17",
        help="oldest system to support (default: the oldest the model allows)",
    )
    _add_filters(parser)
    parser.add_argument(
        "--report",
        type=_report_file,
        action="append",
        default=[],
        metavar="FILE",
        help="write the delegation report too, in the form its suffix says: .html, .json or .txt; "
        "repeatable",
    )
    arguments.add_force(parser)
    arguments.add_json(parser)
    parser.set_defaults(refuse_usage=parser.error)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    """What is delegated, of what Core ML takes."""
    group = parser.add_argument_group("what to delegate")
    module = "a path as layers.0, a path with wildcards, or a class as torch.nn.LayerNorm"
    for option, meaning in (
        ("--skip-op", "operator to leave to the CPU, for example aten.add.Tensor or add"),
        ("--only-op", "operator to delegate, and no others"),
        ("--skip-module", f"module to leave to the CPU: {module}"),
        ("--only-module", "module to delegate, and nothing outside it"),
    ):
        group.add_argument(option, action="append", metavar="NAME", help=f"{meaning}; repeatable")
    group.add_argument(
        "--min-partition-nodes",
        type=arguments.positive,
        default=1,
        metavar="N",
        help="leave partitions of fewer operations to the CPU (default: 1)",
    )
    group.add_argument(
        "--max-partitions",
        type=arguments.positive,
        metavar="N",
        help="delegate at most so many partitions, those of most estimated FLOPs",
    )
    group.add_argument(
        "--strict", action="store_true", help="fail if any operation stays on the CPU"
    )
    group.add_argument(
        "--full-graph",
        action="store_true",
        help="as --strict, and refuse options that leave something to the CPU",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.output is None and not args.dry_run:
        args.refuse_usage("the following arguments are required: -o/--output, or --dry-run")
    output: Path | None = None if args.dry_run else args.output
    reports: list[Path] = args.report
    for path in (output, *reports):
        if path is not None:
            check_output(path, force=args.force)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.scripts.lowering import lower, plan
        from coreml_delegate.scripts.source import load_source
    partitioner = _partitioner(args)
    with console.step(f"Loading {args.source}"):
        source = load_source(
            args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
        )
    program: Any = None if output is None else lower(source, partitioner)
    report = plan(source, partitioner) if output is None else partitioner.report
    with ExitStack() as files:
        if output is not None:
            program.write_to_file(files.enter_context(new_file(output, force=args.force)))
        for path in reports:
            file = files.enter_context(new_file(path, force=args.force))
            file.write(_FORMS[path.suffix](report).encode())
    console.write(report.to_json() if args.json else report.to_table())
    if args.strict or args.full_graph:
        report.require_complete()
    if output is not None and not report.partitions:
        console.warn(f"nothing was delegated to Core ML; {output} runs on the CPU")
    return 0


def _partitioner(args: argparse.Namespace) -> CoreMLPartitioner:
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.compile_options import ComputeUnit, Precision
    from coreml_delegate.partition import CoreMLPartitioner

    return CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(
            compute_unit=ComputeUnit(args.compute_unit),
            minimum_deployment_target=args.deployment_target,
            compute_precision=Precision(args.precision),
        ),
        skip_ops_for_coreml_delegation=args.skip_op,
        only_ops=args.only_op,
        skip_modules=args.skip_module,
        only_modules=args.only_module,
        min_partition_nodes=args.min_partition_nodes,
        max_partitions=args.max_partitions,
        strict=args.strict,
        lower_full_graph=args.full_graph,
    )


def _report_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _FORMS:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_FORMS)}")
    return path


COMMAND = Command(
    name="export",
    summary="lower a PyTorch model to a .pte with Core ML delegates",
    description="Lower a PyTorch model to a .pte with Core ML delegates and print, for every "
    "operation, whether Core ML takes it and why not.",
    add_arguments=add_arguments,
    run=run,
)
