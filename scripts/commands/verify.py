"""``coreml-delegate verify``: compare a program's outputs with the model's."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import InputError, OptionError, ProgramError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import BUNDLE_SUFFIX, ENGINES, SAMPLES
from coreml_delegate.scripts.commands import Command, add_path

if TYPE_CHECKING:
    from coreml_delegate.exported.source_model import SourceModel
    from coreml_delegate.runtime.accuracy import Accuracy
    from coreml_delegate.runtime.loading import Execution, LoadedProgram
    from coreml_delegate.scripts.inputs.data_sets import Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    add_path(
        parser,
        "program",
        "PROGRAM",
        ".pte, .mlpackage, or StableHLO (.mlir, .stablehlo, .jax); omitted if SOURCE is a "
        "bundled program (.bpte), which has its own inputs and outputs, and with --against",
        nargs="?",
    )
    parser.add_argument(
        "--against",
        choices=ENGINES[1:],
        metavar="ENGINE",
        help="compare two engines' outputs for one program, given as SOURCE: --engine (default: "
        f"auto) and this one ({', '.join(ENGINES[1:])})",
    )
    arguments.add_min_sqnr(parser)
    arguments.add_data_set(parser, external=True)
    add_path(
        parser,
        "--etrecord",
        "FILE",
        "ETRecord that export wrote: compare every operation of a .pte with the model's too",
    )
    arguments.add_inputs(parser)
    arguments.add_execution(parser, judging=True)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    args.data_set, args.data = arguments.split_data(args.data)
    if args.data_set is not None and args.input:
        args.refuse_usage("--input and --data exclude each other")
    if args.against is not None:
        return _verify_engine(args)
    if args.program is None:
        return _verify_bundle(args)
    from coreml_delegate.scripts.inputs.source import load_source
    from coreml_delegate.scripts.model_comparison import compare
    from coreml_delegate.scripts.program_arguments import load_for
    from coreml_delegate.scripts.stablehlo_files import is_stablehlo, load_xla_model

    with console.step(f"Loading {args.program}"):
        program = load_for(args)
    with console.step(f"Loading {args.source}"):
        if is_stablehlo(args.source):
            _refuse_options_of_models(args)
            source = load_xla_model(Path(args.source), seed=args.seed)
        else:
            source = load_source(
                args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
            )
    samples = _samples(args, source, program)
    with console.step("Comparing"):
        results = compare(source, program, samples)
    operations: list[Operation] | None = None
    if args.etrecord is not None:
        with console.step("Comparing operations"):
            inputs = next(iter(samples)).leaves
            operations = _compare_operations(args, program.execution, inputs)
    print_results(results, program.execution, operations=operations, as_json=args.json)
    require(results, args.min_sqnr)
    return 0


def _verify_engine(args: argparse.Namespace) -> int:
    """Compare two engines on one program, with the same inputs and from the same states."""
    if args.program is not None or args.etrecord is not None or args.weights or args.input_shape:
        args.refuse_usage("--against takes only a program, no model and none of its options")
    if args.data_set is not None:
        args.refuse_usage("--against takes no data set: its samples are like a model's inputs")
    if args.engine == args.against:
        args.refuse_usage(f"--engine and --against are both {args.against}")
    from coreml_delegate.exported.source_model import copy_inputs
    from coreml_delegate.runtime import EngineOptions
    from coreml_delegate.runtime.accuracy import Accuracy
    from coreml_delegate.runtime.engines.selection import AUTO
    from coreml_delegate.scripts.inputs.input_files import random_inputs, read_inputs
    from coreml_delegate.scripts.inputs.random_tensors import generator
    from coreml_delegate.scripts.program_arguments import load_for

    path = Path(args.source)
    with console.step(f"Loading {path}"):
        program = load_for(args, path, engine=args.engine or AUTO)
        # The other options are those of --engine, and other engines refuse them.
        options = EngineOptions(threads=args.threads, compute_unit=args.compute_unit)
        other = load_for(args, path, host=AUTO, engine=args.against, options=options)
    if args.input:
        samples = [read_inputs(args.input, program.inputs)]
    else:
        random = generator(args.seed)
        samples = [random_inputs(program.inputs, random) for _ in range(args.samples or SAMPLES)]
    results: dict[str, Accuracy] = {}
    with console.step("Comparing"):
        for inputs in samples:
            actual, expected = (loaded.run(copy_inputs(inputs)) for loaded in (program, other))
            for name, got in actual.items():
                results.setdefault(name, Accuracy()).add(expected[name], got)
    print_results(results, program.execution, against=other.execution, as_json=args.json)
    require(results, args.min_sqnr, "the engines differ")
    return 0


def _verify_bundle(args: argparse.Namespace) -> int:
    """Compare a bundled program's outputs with the expected outputs in the bundle."""
    path = Path(args.source)
    if path.suffix != BUNDLE_SUFFIX:
        args.refuse_usage(f"PROGRAM is required, unless SOURCE is a {BUNDLE_SUFFIX}")
    has_inputs = args.input or args.data_set is not None
    if args.etrecord is not None or has_inputs or args.weights or args.input_shape:
        args.refuse_usage("a bundled program has its own inputs and the model's outputs")
    from coreml_delegate.runtime.accuracy import Accuracy
    from coreml_delegate.runtime.loading import as_output
    from coreml_delegate.scripts.program_arguments import bundled_cases, load_for

    cases = bundled_cases(path, args.method)
    if not cases:
        raise ProgramError("the bundle has no such case", got=args.method or "none at all")
    several = len({case.method for case in cases}) > 1
    results: dict[str, Accuracy] = {}
    execution: Execution | None = None
    with console.step("Comparing"):
        for case in cases:
            # Each case starts from the program's initial state.
            program = load_for(args, path, method=case.method)
            execution = program.execution
            actual = program.run(list(case.inputs))
            if not case.expected:
                raise ProgramError(f"a case of {case.method!r} has no expected outputs")
            if len(actual) != len(case.expected):
                raise ProgramError(
                    f"a case of {case.method!r} expects another number of outputs",
                    got=str(len(case.expected)),
                    expected=str(len(actual)),
                )
            for (name, got), want in zip(actual.items(), case.expected, strict=True):
                key = f"{case.method} {name}" if several else name
                results.setdefault(key, Accuracy()).add(as_output(want), got, None)
    if execution is not None:
        print_results(results, execution, as_json=args.json)
    require(results, args.min_sqnr)
    return 0


def require(
    results: Mapping[str, Accuracy],
    min_sqnr: float,
    what: str = "the program differs from its model",
) -> None:
    """Refuse results if one is less accurate than ``min_sqnr``.

    Args:
        results: Accuracy by output name.
        min_sqnr: In dB.
        what: Message of the error.

    Raises:
        ProgramError: Names the outputs, and their ratios of signal to error. Or nothing was
            compared: an output is NaN or infinite on both sides wherever it is not 0, or all
            outputs are 0.
    """
    below = {n: a.sqnr_db for n, a in results.items() if not a.sqnr_db >= min_sqnr}
    if below:
        raise ProgramError(
            what,
            got=", ".join(
                f"{name} at {sqnr:.1f} dB{_int32_remark(results[name])}"
                for name, sqnr in below.items()
            ),
            expected=f"at least {min_sqnr:g} dB",
        )
    empty = {name: accuracy for name, accuracy in results.items() if not accuracy.is_compared}
    if len(empty) < len(results):
        empty = {n: accuracy for n, accuracy in empty.items() if accuracy.nan or accuracy.infinite}
    if empty:
        raise ProgramError(
            "nothing was compared",
            got=", ".join(f"{name} {_trivial(accuracy)}" for name, accuracy in empty.items()),
            expected="finite numbers other than 0",
            remedy="Pass inputs (--input) for which the outputs have finite numbers other than 0",
        )


def _ratio(accuracy: Accuracy) -> str:
    if accuracy.sqnr_db != math.inf:
        return f"{accuracy.sqnr_db:.1f} dB"
    return "equal" if accuracy.is_compared else _trivial(accuracy)


def _trivial(accuracy: Accuracy) -> str:
    """Describe an output without a compared value."""
    if not accuracy.elements:
        return "without values"
    counts = {"NaN": accuracy.nan, "infinite": accuracy.infinite}
    counts["0"] = accuracy.elements - sum(counts.values())
    return "all " + " or ".join(kind for kind, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a program, and the model's calls whose value it computes.

    Attributes:
        name: Its debug symbol, or the name of its kernel.
    """

    name: str
    calls: tuple[str, ...]
    sqnr_db: float


def _compare_operations(
    args: argparse.Namespace, execution: Execution, inputs: list[Any]
) -> list[Operation]:
    """Compare the values of operations with the values in the ETRecord's graph."""
    from coreml_delegate.patches.third_party import wrap_errors
    from coreml_delegate.runtime.devtools import Inspector
    from coreml_delegate.runtime.engines.selection import AUTO
    from coreml_delegate.scripts.delegates import open_pte, read_etrecord
    from coreml_delegate.scripts.program_arguments import DEBUG_BUFFER, load_for

    # The engine of the comparison above, if it had one.
    engine = args.engine or next(iter(execution.engines), AUTO)
    traced = load_for(args, engine=engine, enable_etdump=True, debug_buffer_size=DEBUG_BUFFER)
    record = read_etrecord(args.etrecord, open_pte(args.program, args.data))
    record.update_representative_inputs(list(inputs))
    traced.run(inputs)
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
        etdump, values = traced.events()
        buffer = Path(folder) / "values"
        buffer.write_bytes(values)
        with wrap_errors("ExecuTorch's Inspector fails; is it this program's ETRecord?"):
            inspector = Inspector(
                etdump_data=etdump, etrecord=record, debug_buffer_path=str(buffer)
            )
            table = inspector.calculate_numeric_gap("SNR")
    return [
        Operation(str(names[-1]), tuple(calls), float(gap[0]))
        for names, calls, gap in zip(
            table["runtime_ops"], table["aot_ops"], table["gap"], strict=True
        )
    ]


def _refuse_options_of_models(args: argparse.Namespace) -> None:
    for option, value in (("--weights", args.weights), ("--input-shape", args.input_shape)):
        if value:
            raise OptionError(f"{option} is for a PyTorch model", got=args.source)


def _int32_remark(accuracy: Accuracy) -> str:
    """Return a remark if integers beyond int32 may explain the difference."""
    op = accuracy.beyond_int32
    return "" if op is None else f" (beyond int32: int64 values of {op} in PyTorch)"


def _samples(
    args: argparse.Namespace, source: SourceModel, program: LoadedProgram
) -> Iterable[Sample]:
    import torch

    from coreml_delegate.scripts.inputs.data_sets import DataSet, Sample
    from coreml_delegate.scripts.inputs.input_files import random_value, read_inputs
    from coreml_delegate.scripts.inputs.random_tensors import generator, resampled

    ports = [port for port in program.inputs if port.is_tensor]
    positions = [n for n, leaf in enumerate(source.leaves) if isinstance(leaf, torch.Tensor)]
    if len(positions) != len(ports):
        raise InputError(
            "program and model have different numbers of inputs",
            got=str(len(ports)),
            expected=str(len(positions)),
        )
    if args.input:
        read = iter(read_inputs(args.input, ports))
        return [Sample([next(read) if isinstance(n, torch.Tensor) else n for n in source.leaves])]
    if args.data_set is not None:
        image = ports[0].image if len(ports) == 1 else None
        return DataSet(args.data_set, source, limit=args.samples, image=image)
    count = args.samples or SAMPLES
    images = {n: port for n, port in zip(positions, ports, strict=True) if port.image is not None}
    # Inputs of --input-shape are random, no example; and few examples are pixels.
    example = [] if args.input_shape or images else [list(source.leaves)]
    samples = example + list(resampled(source.leaves, count - len(example), args.seed))
    random = generator(args.seed)
    for leaves in samples:
        for n, port in images.items():
            leaves[n] = random_value(port, random).to(leaves[n].dtype).expand(leaves[n].shape)
    return [Sample(leaves) for leaves in samples]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _hits(accuracy: Accuracy) -> dict[str, Any]:
    """Return the accuracies on labels for JSON; empty without labels."""
    if not accuracy.hits.rows:
        return {}
    by_source = {"program": accuracy.hits, "model": accuracy.model_hits}
    return {
        "accuracy": {
            "rows": accuracy.hits.rows,
            **{f"{who}_top1": hits.top1 for who, hits in by_source.items()},
            **{f"{who}_top5": hits.top5 for who, hits in by_source.items()},
        }
    }


def print_results(
    results: Mapping[str, Accuracy],
    execution: Execution,
    *,
    operations: list[Operation] | None = None,
    against: Execution | None = None,
    as_json: bool,
) -> None:
    """Print the accuracy of every output."""
    if as_json:
        outputs = {
            name: {
                "sqnr_db": accuracy.sqnr_db,
                "max_abs_error": accuracy.max_abs_error,
                "top1_agreement": accuracy.top1_agreement,
                "top5_agreement": accuracy.top5_agreement,
                **_hits(accuracy),
                "nan": accuracy.nan,
                "infinite": accuracy.infinite,
                "compared": accuracy.compared,
                "beyond_int32": accuracy.beyond_int32,
            }
            for name, accuracy in results.items()
        }
        content: dict[str, Any] = {"engines": execution.engines, "outputs": outputs}
        if against is not None:
            content["against"] = against.engines
        if operations is not None:
            content["operations"] = [asdict(operation) for operation in operations]
        console.write_json(content)
        return
    rows = [("output", "SQNR", "max abs error", "top-1 agreement", "top-5 agreement")]
    for name, accuracy in results.items():
        rows.append(
            (
                name,
                _ratio(accuracy),
                f"{accuracy.max_abs_error:.3g}",
                _percent(accuracy.top1_agreement),
                _percent(accuracy.top5_agreement),
            )
        )
    console.write(console.columns(rows))
    for name, accuracy in results.items():
        hits, model = accuracy.hits, accuracy.model_hits
        if hits.rows:
            console.write(
                f"{name}: of {hits.rows} labels, top-1 {_percent(hits.top1)} (model "
                f"{_percent(model.top1)}), top-5 {_percent(hits.top5)} (model "
                f"{_percent(model.top5)})"
            )
        if accuracy.nan:
            console.write(f"{name}: {accuracy.nan} values are NaN in both")
    if operations is not None:
        table = [("operation", "SQNR", "calls of the model")]
        for operation in operations:
            sqnr = "-" if math.isnan(operation.sqnr_db) else f"{operation.sqnr_db:.1f} dB"
            table.append((operation.name, sqnr, ", ".join(operation.calls)))
        console.write("\n" + console.columns(table))
    compared = "" if against is None else f", compared with {against}"
    console.write(f"computed by {execution}{compared}")


COMMAND = Command(
    name="verify",
    summary="compare a program with the model it was made from",
    description="Run the model and the program on the same inputs and compare every output. Give "
    "SOURCE, --weights, --input-shape and --seed the values that export got. SOURCE may be a "
    "StableHLO file (.mlir, .stablehlo, .jax), which XLA runs. With --against, compare two engines "
    "instead.",
    add_arguments=add_arguments,
    run=run,
)
