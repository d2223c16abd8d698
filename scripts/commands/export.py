"""``coreml-delegate export``: from a PyTorch model to a ``.pte`` with Core ML delegates.

Or to an ``.mlpackage``, which is the whole model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import LoweringError
from coreml_delegate.formats.mlpackage import SUFFIX
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.patches.third_party import quiet_import, wrap_errors
from coreml_delegate.scripts import (
    arguments,
    console,
    model_packages,
    precision_measuring,
    quantization_options,
)
from coreml_delegate.scripts.arguments import (
    BUNDLE_SUFFIX,
    check_outputs,
    new_output,
    new_package,
)
from coreml_delegate.scripts.commands import Command
from coreml_delegate.scripts.inputs import flexible_shapes

if TYPE_CHECKING:
    from coreml_delegate.device_check import Finding
    from coreml_delegate.device_check.processors import ProcessorShare
    from coreml_delegate.exported.source_model import Outcome, SourceModel
    from coreml_delegate.formats.blob import Buffer
    from coreml_delegate.partition import CoreMLPartitioner, DelegationReport
    from coreml_delegate.quantization import QuantizationAssignment
    from coreml_delegate.runtime.program.plan import MethodInfo
    from coreml_delegate.scripts.quantization_options import QuantizationSummary

    _Check = Callable[[], tuple[list[Finding], list[ProcessorShare]]]

_PAGE = ".html"
_OTHER_MODELS = frozenset({".mlmodel", ".mlmodelc"})
_FORMS: Mapping[str, Callable[[DelegationReport], str]] = {
    _PAGE: lambda report: report.to_html(),
    ".json": lambda report: f"{report.to_json()}\n",
    ".txt": lambda report: f"{report.to_table()}\n",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="program to write, required without --dry-run: a .pte, or an .mlpackage of the whole "
        "model, for apps without ExecuTorch",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="report what would be delegated, without lowering; only --report is written",
    )
    parser.add_argument(
        "--etrecord",
        type=Path,
        metavar="FILE",
        help="write an ETRecord, with the example inputs, for ExecuTorch's Inspector and verify",
    )
    parser.add_argument(
        "--bundle",
        type=arguments.positive,
        metavar="N",
        help="write a bundled program (.bpte) beside the output: the program, N inputs, and the "
        "model's outputs for them",
    )
    arguments.add_allow_missing_kernels(parser)
    arguments.add_options(parser, CompileOptions)
    precision_measuring.add_no_verify(parser)
    arguments.add_options(parser.add_argument_group("what to delegate"), PartitionerKeywords)
    flexible_shapes.add_flexible_shapes(parser)
    quantization_options.add_quantization(parser)
    model_packages.add_interface(parser)
    arguments.add_report(parser, _FORMS, what="the delegation report")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    output = _check_outputs(args)
    interface = model_packages.interface_of(args, args.output)
    is_package = model_packages.is_package(output)
    assignment = quantization_options.assignment_of(args)
    quantization_options.check(args, assignment)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.partition.export import export_model, lower_methods, plan
        from coreml_delegate.partition.package import (
            example_inputs,
            naming_the_remedy,
            package_files,
            require_states,
        )
        from coreml_delegate.scripts.inputs.source import load_source
    _ = _partitioner(args, assignment)  # checks the options before the model is loaded
    with console.step(f"Loading {args.source}"):
        source = load_source(
            args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
        )
    source = flexible_shapes.with_dynamic_shapes(source, args.dynamic, args.enumerated_shapes)
    sizes: QuantizationSummary | None = None
    if assignment is not None:
        source, sizes = _quantized(args, source, assignment)
    partitioner = _partitioner(args, assignment, source)
    with console.step("Exporting with torch.export"):
        exported = export_model(source)
    inputs = example_inputs(exported, source.leaves)
    program: Any = None
    remedy = naming_the_remedy() if is_package else nullcontext()
    with console.step("Planning" if output is None else "Lowering to Core ML"), remedy:
        if output is None:
            report = plan(exported, partitioner)
        else:
            program = lower_methods(
                {"forward": exported}, partitioner, generate_etrecord=args.etrecord is not None
            )
            report = partitioner.report
    if not args.force:
        report.require_precision()
    if program is not None and args.precision is Precision.FLOAT16 and not args.no_verify:
        samples = flexible_shapes.samples_of_shapes(source, args.enumerated_shapes, args.seed)
        report = _measured(report, program.buffer, samples, args.min_sqnr)
    package = None
    if program is not None and is_package:
        require_states(report)
        package = package_files(program.buffer, interface, inputs)
    checked = cache(partial(_checked, report, program))
    _write(args, output, program, package, source, report, checked)
    if sizes is not None and program is not None:
        sizes = sizes.with_program(program.buffer)
    is_shaped = program is not None and args.device is not None
    shares = checked()[1] if is_shaped else []
    _print(report, sizes, shares, as_json=args.json)
    if args.strict or args.full_graph:
        report.require_complete()
    if output is not None and not report.partitions:
        console.warn(f"nothing was delegated to Core ML; {output} runs on the CPU")
    report.require_lowerable()
    if not args.allow_missing_kernels:
        report.require_kernels()
    return 0


def _measured(
    report: DelegationReport, program: bytes, samples: list[list[Any]], min_sqnr_db: float
) -> DelegationReport:
    """Measure a program in fp16 on samples; warn if its outputs miss the target."""
    from coreml_delegate.partition.precision import calls_by_handle
    from coreml_delegate.runtime.precision import LoweredProgram, measure_method

    if not report.partitions:
        return report
    lowered = LoweredProgram(partial(measure_method, program, samples), calls_by_handle(report))
    return replace(report, precision=precision_measuring.measured(lowered.report, min_sqnr_db))


def _write(
    args: argparse.Namespace,
    output: Path | None,
    program: Any,
    package: Mapping[str, Buffer] | None,
    source: SourceModel,
    report: DelegationReport,
    checked: _Check,
) -> None:
    """Write the program, its reports, ETRecord and bundle: all files, or none of them."""
    content: dict[Path, Callable[[], bytes]] = {
        path: partial(_page, report, checked)
        if path.suffix == _PAGE and output is not None
        else partial(_report, report, path.suffix)
        for path in args.report
    }
    if output is not None and args.etrecord is not None:
        content[args.etrecord] = partial(_etrecord, program, source)
    if output is not None and args.bundle is not None:
        bundle = partial(_bundle, program, source, args.bundle, args.seed)
        content[output.with_suffix(BUNDLE_SUFFIX)] = bundle
    with ExitStack() as files:
        if output is not None and package is not None:
            files.enter_context(new_package(package, output, force=args.force))
        elif output is not None:
            program.write_to_file(files.enter_context(new_output(output, force=args.force)))
        for path, render in content.items():
            files.enter_context(new_output(path, force=args.force)).write(render())


def _report(report: DelegationReport, suffix: str) -> bytes:
    return _FORMS[suffix](report).encode()


def _page(report: DelegationReport, checked: _Check) -> bytes:
    """Return the report's page, with the findings of ``check`` for the program."""
    from coreml_delegate.scripts.device_findings import page_rows

    findings, shares = checked()
    return report.to_html(device=page_rows(findings), processors=list(map(str, shares))).encode()


def _checked(report: DelegationReport, program: Any) -> tuple[list[Finding], list[ProcessorShare]]:
    """Return the findings of ``check``, and the shares of the neural engine."""
    from coreml_delegate.device_check import check
    from coreml_delegate.device_check.processors import processor_shares
    from coreml_delegate.runtime.program.pte import PteProgram
    from coreml_delegate.scripts.device_findings import models_of_pte, modules_of_report

    if not report.partitions:
        return [], []
    models = models_of_pte(PteProgram.open(program.buffer), modules_of_report(report)).checked
    findings = check(models)
    return findings, processor_shares(models, findings)


def _etrecord(program: Any, source: SourceModel) -> bytes:
    """Return the ETRecord of a lowered model, with its example inputs."""
    record = program.get_etrecord()
    record.update_representative_inputs(list(source.leaves))
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
        path = Path(folder) / "record.etrecord"
        with wrap_errors("ExecuTorch cannot write an ETRecord", kind=LoweringError):
            record.save(str(path))
        return path.read_bytes()


def _bundle(program: Any, source: SourceModel, count: int, seed: int) -> bytes:
    """Return a bundled program, with the model's own outputs for the example and random inputs."""
    from torch.nn import Module

    from coreml_delegate.runtime.program.pte import PteProgram
    from coreml_delegate.runtime.program.signature import mutated_inputs
    from coreml_delegate.scripts.inputs.random_tensors import resampled

    method = PteProgram.open(program.buffer).method("forward")
    _check_bundled(method)
    mutated = mutated_inputs(method)
    samples = [list(source.leaves), *resampled(source.leaves, count - 1, seed)]
    # Each case starts from the program's initial state.
    buffers: list[Any] = (
        list(module.buffers()) if isinstance(module := source.module, Module) else []
    )
    initial_values = [buffer.clone() for buffer in buffers]
    outcomes: list[Outcome] = []
    for sample in samples:
        outcome = source.execute(sample)
        results = tuple(map(_copied, outcome.results))  # they may be the buffers themselves
        outcomes.append(replace(outcome, results=results))
        for buffer, initial in zip(buffers, initial_values, strict=True):
            buffer.data.copy_(initial)
    with quiet_import():
        from executorch.devtools import BundledProgram
        from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
        from executorch.devtools.bundled_program.serialize import (
            serialize_from_bundled_program_to_flatbuffer,
        )
    with wrap_errors("ExecuTorch cannot bundle the program", kind=LoweringError):
        cases = [
            MethodTestCase(
                inputs=sample,
                expected_outputs=[
                    *(outcome.inputs[i] for i in mutated.values()),
                    *outcome.results,
                ],
            )
            for sample, outcome in zip(samples, outcomes, strict=True)
        ]
        bundle = BundledProgram(program, [MethodTestSuite("forward", cases)])
        return bytes(serialize_from_bundled_program_to_flatbuffer(bundle))


def _check_bundled(method: MethodInfo) -> None:
    """Refuse inputs and outputs that a bundled program cannot hold."""
    from coreml_delegate.runtime.program.signature import input_names, output_names

    named = [
        *zip(input_names(method), method.input_specs, strict=True),
        *zip(output_names(method), method.output_specs, strict=True),
    ]
    if absent := [name for name, spec in named if spec is None]:
        raise LoweringError(
            "a bundled program cannot hold None or text",
            got=", ".join(absent),
            expected="tensors and numbers as inputs and outputs",
            remedy="Leave --bundle out; record keeps inputs and outputs of every kind",
        )


def _copied(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _check_outputs(args: argparse.Namespace) -> Path | None:
    """Return the path of the program, or None in a dry run; check all output paths."""
    if args.output is None and not args.dry_run:
        args.refuse_usage("the following arguments are required: -o/--output, or --dry-run")
    output: Path | None = None if args.dry_run else args.output
    reports: list[Path] = args.report
    if args.output is not None and args.output.suffix in _OTHER_MODELS:
        model_packages.check_suffix(args.output, (model_packages.PROGRAM_SUFFIX, SUFFIX))
    is_package = model_packages.is_package(args.output)
    args.full_graph = args.full_graph or is_package
    for option, value in (("--etrecord", args.etrecord), ("--bundle", args.bundle)):
        if value is not None and output is None:
            args.refuse_usage(f"{option} goes with --output, and not with --dry-run")
        if value is not None and is_package:
            args.refuse_usage(f"{option} belongs to a .pte, not to an {SUFFIX}")
    bundle = None
    if output is not None and args.bundle is not None:
        if output.suffix == BUNDLE_SUFFIX:
            args.refuse_usage(f"--output is the .pte; the {BUNDLE_SUFFIX} is written beside it")
        bundle = output.with_suffix(BUNDLE_SUFFIX)
    check_outputs((output, bundle, args.etrecord, *reports), force=args.force)
    return output


def _print(
    report: DelegationReport,
    sizes: QuantizationSummary | None,
    shares: list[ProcessorShare],
    *,
    as_json: bool,
) -> None:
    if as_json:
        further = {} if sizes is None else {"quantization": sizes.as_dict()}
        further |= {"processors": [share.as_dict() for share in shares]} if shares else {}
        if further:
            console.write_json(report.to_dict() | further)
        else:
            console.write(report.to_json())
        return
    console.write(report.to_table())
    for line in (*([] if sizes is None else [sizes]), *shares):
        console.write(str(line))


def _quantized(
    args: argparse.Namespace, source: SourceModel, assignment: QuantizationAssignment
) -> tuple[SourceModel, QuantizationSummary]:
    from coreml_delegate.quantization.apply import quantize_model

    samples = quantization_options.calibration_samples(args, source, assignment)
    summary = quantization_options.QuantizationSummary.of(source, assignment)
    progress = console.progress(samples, "Calibrating") if samples else nullcontext(samples)
    with console.step(f"Quantizing by {assignment.mode.name}"), progress as tracked:
        quantized = quantize_model(source, assignment, tracked)
    quantization_options.warn_of_float(quantized.in_float)
    return quantized.source, summary


def _partitioner(
    args: argparse.Namespace,
    assignment: QuantizationAssignment | None,
    source: SourceModel | None = None,
) -> CoreMLPartitioner:
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.partition import CoreMLPartitioner
    from coreml_delegate.quantization.configs import compile_keywords

    compiling = arguments.keywords_of(args, CompileOptions)
    if assignment is not None:
        compiling |= compile_keywords(assignment, args.deployment_target)
    specs = CompileOptions.from_keywords(**compiling).to_specs()
    if source is not None and args.enumerated_shapes:
        program = source.export()
        shapes = flexible_shapes.enumerated(args.enumerated_shapes)
        in_graph = dict(zip(source.input_names, program.graph_signature.user_inputs, strict=True))
        by_node = {str(in_graph.get(name, name)): choices for name, choices in shapes.items()}
        specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(program, by_node))
    keywords = arguments.keywords_of(args, PartitionerKeywords)
    if source is not None and args.precision is Precision.AUTO:
        keywords["precision_data"] = (
            flexible_shapes.samples_of_shapes(source, args.enumerated_shapes, args.seed)
            if args.calibration is None
            else quantization_options.read_samples(args, source)
        )
    return CoreMLPartitioner(compile_specs=specs, **keywords)


COMMAND = Command(
    name="export",
    summary="lower a PyTorch model to a .pte with Core ML delegates, or to an .mlpackage",
    description="Lower a PyTorch model to a .pte with Core ML delegates, or as a whole to an "
    ".mlpackage, and print, for every operation, whether Core ML takes it, or why not.",
    add_arguments=add_arguments,
    run=run,
)
