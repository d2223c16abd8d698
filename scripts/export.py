"""``coreml-delegate export``: from a PyTorch model to a ``.pte`` with Core ML delegates."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.command import Command
from coreml_delegate.scripts.output_file import check_output, new_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.pte")
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
    parser.add_argument(
        "--skip-op",
        action="append",
        default=[],
        metavar="NAME",
        help="operator to leave to the CPU, for example aten.add.Tensor or add; repeatable",
    )
    parser.add_argument(
        "--full-graph", action="store_true", help="fail unless Core ML takes every operation"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE.json", help="write the delegation report as JSON too"
    )
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    outputs = [path for path in (args.output, args.report) if path is not None]
    for path in outputs:
        check_output(path, force=args.force)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.backend import CoreMLBackend
        from coreml_delegate.compile_options import ComputeUnit, Precision
        from coreml_delegate.partition import CoreMLPartitioner
        from coreml_delegate.scripts.lowering import lower
        from coreml_delegate.scripts.source import load_source
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(
            compute_unit=ComputeUnit(args.compute_unit),
            minimum_deployment_target=args.deployment_target,
            compute_precision=Precision(args.precision),
        ),
        skip_ops_for_coreml_delegation=args.skip_op,
        lower_full_graph=args.full_graph,
    )
    with console.step(f"Loading {args.source}"):
        source = load_source(
            args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
        )
    program = lower(source, partitioner)
    report = partitioner.report
    with ExitStack() as files:
        for path in outputs:
            file = files.enter_context(new_file(path, force=args.force))
            if path is args.output:
                program.write_to_file(file)
            else:
                file.write(f"{report.to_json()}\n".encode())
    if not report.partitions:
        console.warn(f"nothing was delegated to Core ML; {args.output} runs on the CPU")
    console.write(report.to_json() if args.json else report.to_table())
    return 0


COMMAND = Command(
    name="export",
    summary="lower a PyTorch model to a .pte with Core ML delegates",
    description="Lower a PyTorch model to a .pte with Core ML delegates and print, for every "
    "operation, whether Core ML takes it and why not.",
    add_arguments=add_arguments,
    run=run,
)
