"""``coreml-delegate check``: find documented causes of trouble on a device."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import CoreMLDelegateError, OptionError, ProgramError
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.scripts import arguments, console, quantization_options
from coreml_delegate.scripts.arguments import BUNDLE_SUFFIX, check_output, new_output
from coreml_delegate.scripts.commands import Command, add_path
from coreml_delegate.scripts.commands.trace_values import warn_of_rounded_constants

if TYPE_CHECKING:
    from coreml_delegate.device_check import Finding, MeasuredProgram
    from coreml_delegate.device_check.compute_plan import MatchedPlan
    from coreml_delegate.runtime import Diagnosis
    from coreml_delegate.scripts.device_findings import ProgramModels

# Copies, because importing the enum takes seconds; a test compares them.
CONSEQUENCES = (
    "fails",
    "leaves-neural-engine",
    "less-exact",
    "slower",
    "larger-file",
    "newer-system",
)
_ANY = "any"
_ACCURACY = "fp16-accuracy"
"""The rule that needs a measurement."""

_Content = Mapping[str, Any]
_FORMS: Mapping[str, Callable[[str, _Content], str]] = {
    ".json": lambda _, content: console.as_json(content),
    ".txt": lambda text, _: text,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_path(
        parser, "program", "PROGRAM", ".pte, .bpte or .mlpackage; omitted with --rules", nargs="?"
    )
    parser.add_argument(
        "--rules", action="store_true", help="list the rules with their sources, and stop"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="RULE",
        help="rule to leave out, repeatable",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=(*CONSEQUENCES, _ANY),
        metavar="CONSEQUENCE",
        help="fail if a finding has this consequence, repeatable: "
        f"{', '.join(CONSEQUENCES)} or {_ANY} (default: findings do not fail the command)",
    )
    add_path(
        parser, "--etrecord", "FILE", "ETRecord that export wrote: name the modules of the model"
    )
    quantization_options.add_calibration(
        parser,
        "inputs to run, for the rules on overflow, underflow and accuracy: a folder of images or "
        "arrays, FILE.npz or MODULE:FACTORY; a .bpte has its own",
    )
    arguments.add_options(parser, PartitionerKeywords, ("min_sqnr_db",))
    arguments.add_method(parser)
    parser.add_argument(
        "--compute-plan",
        action="store_true",
        help="on a Mac: show each operation's processor in Core ML's plan, beside the rules' "
        "predictions",
    )
    add_path(
        parser,
        "--against",
        "PLAN",
        "show the same for a plan from another machine, as JSON or as the performance report that "
        "Xcode exports (NAME.mlperf); repeatable",
        action="append",
        default=[],
    )
    arguments.add_data(parser)
    arguments.add_report(parser, _FORMS, what="the findings")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.rules:
        return _list_rules(args)
    if args.program is None:
        args.refuse_usage("the following arguments are required: PROGRAM")
    reports: list[Path] = args.report
    for path in reports:
        check_output(path, force=args.force)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.device_check import check, rule_named
        from coreml_delegate.device_check.compute_plan import require_macos
        from coreml_delegate.device_check.processors import processor_shares
        from coreml_delegate.scripts import device_findings
        from coreml_delegate.scripts.compute_plans import compare
    for name in args.ignore:
        rule_named(name)
    if args.compute_plan:
        require_macos()
    with console.step(f"Reading {args.program}"):
        models = _models(args)
    plans = _plans(args, models)
    for delegates, why in models.unreadable.items():
        console.warn(f"{delegates} is not checked: {why}")
    samples = _samples(args)
    diagnoses = _diagnoses(args, samples)
    warn_of_rounded_constants(diagnoses)
    measurements = [] if _ACCURACY in args.ignore else _measurements(args, samples)
    with console.step("Checking"):
        findings = check(models.checked, diagnoses, measurements, ignore=args.ignore)
        shares = processor_shares(models.checked, findings)
    content: dict[str, Any] = {
        "program": str(args.program),
        "delegates": [name for model in models.checked for name in model.name.split(", ")],
        "runs": len(diagnoses),
        "has_rounded_constants": any(d.has_rounded_constants for _, d in diagnoses),
        "precision": [_precision_data(measured) for measured in measurements],
        "findings": [finding.as_dict() for finding in findings],
        "processors": [share.as_dict() for share in shares],
        "saved_bytes": device_findings.saved_bytes(findings),
    }
    text = device_findings.table(findings) if findings else "nothing found"
    text = "\n\n".join([text, *(["\n".join(map(str, shares))] if shares else [])])
    if plans:
        compared = [(plan.model.name, *compare(plan, findings)) for plan in plans]
        content["compute_plans"] = [{"delegates": n, **data} for n, _, data in compared]
        text = "\n\n".join((text, *(plan_text for _, plan_text, _ in compared)))
    with ExitStack() as files:
        for path in reports:
            file = files.enter_context(new_output(path, force=args.force))
            file.write(f"{_FORMS[path.suffix](text, content)}\n".encode())
    if args.json:
        console.write_json(content)
    else:
        console.write(text)
    _fail_on(findings, args.fail_on)
    return 0


def _list_rules(args: argparse.Namespace) -> int:
    if args.program is not None:
        args.refuse_usage("--rules takes no PROGRAM")
    from coreml_delegate.device_check import RULES
    from coreml_delegate.scripts.device_findings import rules_text

    if args.json:
        console.write_json([rule.as_dict() for rule in RULES])
    else:
        console.write(rules_text(RULES))
    return 0


def _models(args: argparse.Namespace) -> ProgramModels:
    from coreml_delegate.runtime.loading import is_package
    from coreml_delegate.scripts.delegates import open_pte
    from coreml_delegate.scripts.device_findings import (
        models_of_package,
        models_of_pte,
        modules_of_etrecord,
    )

    path: Path = args.program
    if is_package(path):
        for option, value in (("--data", args.data), ("--etrecord", args.etrecord)):
            if value:
                raise OptionError(f"{option} is for a .pte", got=str(path))
        return models_of_package(path)
    program = open_pte(path, args.data)
    modules = None if args.etrecord is None else modules_of_etrecord(args.etrecord, program)
    return models_of_pte(program, modules)


def _samples(args: argparse.Namespace) -> list[tuple[str | None, list[Any]]]:
    """Read the inputs of the user's data, each with the method that takes them."""
    from coreml_delegate.scripts.program_arguments import (
        bundled_cases,
        calibration_samples,
        load_to_diagnose,
    )

    path: Path = args.program
    if args.calibration is not None:
        program = load_to_diagnose(path, args.method, args.data)
        return [(args.method, inputs) for inputs in calibration_samples(args, program.inputs)]
    if path.suffix == BUNDLE_SUFFIX:
        return [(case.method, list(case.inputs)) for case in bundled_cases(path, args.method)]
    if args.method is not None:
        raise OptionError("--method needs --calibration", got=args.method)
    return []


def _diagnoses(
    args: argparse.Namespace, samples: Sequence[tuple[str | None, list[Any]]]
) -> list[tuple[str, Diagnosis]]:
    """Run the program on the user's data, every value in fp16 and in fp32."""
    from coreml_delegate.scripts.program_arguments import load_to_diagnose

    diagnoses: list[tuple[str, Diagnosis]] = []
    with console.progress(samples, "Running on the data") as tracked:
        for method, inputs in tracked:
            # Each sample starts from the program's initial state.
            program = load_to_diagnose(args.program, method, args.data)
            diagnoses += program.diagnose(inputs)
    return diagnoses


def _measurements(
    args: argparse.Namespace, samples: Sequence[tuple[str | None, list[Any]]]
) -> list[MeasuredProgram]:
    """Measure the outputs on the user's data, and what precision ``auto`` would gain."""
    by_method: dict[str | None, list[list[Any]]] = {}
    for method, inputs in samples:
        by_method.setdefault(method, []).append(inputs)
    measurements: list[MeasuredProgram] = []
    try:
        with console.step("Measuring in fp16"):
            for method, own in by_method.items():
                measurements.append(_measurement(args, method, own))
    except CoreMLDelegateError as error:
        console.note(f"not measured, because the program does not run here: {error}")
    return measurements


def _measurement(
    args: argparse.Namespace, method: str | None, samples: list[list[Any]]
) -> MeasuredProgram:
    from coreml_delegate.device_check import MeasuredProgram
    from coreml_delegate.runtime import Model, load_mlpackage
    from coreml_delegate.runtime.delegate import delegate_names
    from coreml_delegate.runtime.engines.selection import REFERENCE
    from coreml_delegate.runtime.loading import is_package
    from coreml_delegate.runtime.precision import measure_method, measure_model
    from coreml_delegate.scripts.delegates import open_pte

    path: Path = args.program
    if is_package(path):
        model = load_mlpackage(path, function_name=method, engine=REFERENCE.name)
        if not isinstance(model, Model):
            raise ProgramError("a pipeline cannot be measured", got=str(path))
        measured = measure_model(model, samples, min_sqnr_db=args.min_sqnr)
        return MeasuredProgram((path.stem,), measured)
    program = open_pte(path, args.data)
    name = method or program.default_method
    measured = measure_method(
        path, samples, method=name, data=args.data or None, min_sqnr_db=args.min_sqnr
    )
    return MeasuredProgram(tuple(delegate_names(program.method(name)).values()), measured)


def _plans(args: argparse.Namespace, models: ProgramModels) -> list[MatchedPlan]:
    """Get the plans from the files of --against, and from Core ML on this Mac."""
    from coreml_delegate.scripts.compute_plans import plans_of_core_ml, plans_of_files

    plans = list(plans_of_files(args.against, models)) if args.against else []
    if args.compute_plan:
        with console.step("Asking Core ML for its plans"):
            plans += plans_of_core_ml(models)
    return plans


def _precision_data(program: MeasuredProgram) -> dict[str, Any]:
    measurement = program.measurement
    return asdict(measurement) | {
        "delegates": list(program.delegates),
        "holds": measurement.holds,
        "is_reached": measurement.is_reached,
    }


def _fail_on(findings: Sequence[Finding], consequences: Sequence[str]) -> None:
    counts = Counter(
        finding.rule.name
        for finding in findings
        if _ANY in consequences or finding.rule.consequence.value in consequences
    )
    if counts:
        raise ProgramError(
            "the program has findings that --fail-on names",
            got=", ".join(f"{count} of {name}" for name, count in counts.items()),
            remedy="Follow the remedies, or --ignore a rule",
        )


COMMAND = Command(
    name="check",
    summary="find causes of trouble on a device, such as ops that leave the neural engine",
    description="Check a program against documented causes of trouble: operations that leave "
    "the neural engine, fail on a device, lose accuracy or take more space than needed. Every rule "
    "cites a public source.",
    add_arguments=add_arguments,
    run=run,
)
