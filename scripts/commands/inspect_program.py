"""``coreml-delegate inspect``: show the contents of a ``.pte`` or an ``.mlpackage``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import check_output, new_output
from coreml_delegate.scripts.commands import Command, add_path

_MAX_WEIGHTS = 10
_MAX_LABELS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_program(parser)
    parser.add_argument(
        "--weights",
        action="store_true",
        help=f"list all weights, not only the {_MAX_WEIGHTS} largest of a model (--json lists all)",
    )
    add_path(
        parser,
        "--model-explorer",
        "FILE",
        "write the graphs for Model Explorer, with the operations inside delegates",
    )
    add_path(
        parser,
        "--etrecord",
        "FILE",
        "with --model-explorer: ETRecord that export wrote, for the modules of the model",
    )
    arguments.add_data(parser)
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.runtime.loading import is_package
    from coreml_delegate.scripts.stablehlo_files import is_stablehlo
    from coreml_delegate.scripts.summary import (
        summarize_package,
        summarize_pte,
        summarize_stablehlo,
    )

    path: Path = args.program
    if args.etrecord is not None and args.model_explorer is None:
        args.refuse_usage("--etrecord goes with --model-explorer")
    if args.model_explorer is not None:
        check_output(args.model_explorer, force=args.force)
        _write_graphs(args)
        return 0
    lines = _package_lines
    if is_stablehlo(path):
        summary = summarize_stablehlo(path)
    elif is_package(path):
        summary = summarize_package(path)
    else:
        summary, lines = summarize_pte(path, args.data), _pte_lines
    if args.json:
        console.write_json(summary)
    else:
        console.write("\n".join(lines(summary, every=args.weights)))
    return 0


def _write_graphs(args: argparse.Namespace) -> None:
    from coreml_delegate.runtime.loading import is_package
    from coreml_delegate.scripts.delegates import open_pte, read_etrecord
    from coreml_delegate.scripts.model_explorer import graphs_of_package, graphs_of_pte
    from coreml_delegate.scripts.stablehlo_files import is_stablehlo

    path: Path = args.program
    if is_stablehlo(path):
        raise OptionError("Model Explorer opens StableHLO itself", got=str(path))
    if is_package(path):
        if args.etrecord is not None:
            raise OptionError("--etrecord is for a .pte", got=str(path))
        graphs = graphs_of_package(path)
    else:
        program = open_pte(path, args.data)
        record = None if args.etrecord is None else read_etrecord(args.etrecord, program)
        graphs = graphs_of_pte(path, program, record)
    with new_output(args.model_explorer, force=args.force) as file:
        file.write(json.dumps(graphs).encode())


def _pte_lines(summary: Mapping[str, Any], *, every: bool) -> Iterator[str]:
    yield f"{summary['file']}: {console.size(summary['bytes'])}"
    if summary["external_tensors"]:
        yield f"external tensors: {', '.join(summary['external_tensors'])}"
    described: dict[str, str] = {}  # models that methods share, each with the first method
    for method in summary["methods"]:
        yield f"method {method['name']}"
        for side in ("inputs", "outputs"):
            yield f"  {side}: {', '.join(map(_named, method[side])) or 'none'}"
        yield f"  operators outside delegates: {_counts(method['operators_outside'])}"
        for index, delegate in enumerate(method["delegates"]):
            first = described.setdefault(delegate.get("shared_as", ""), method["name"])
            yield from _delegate_lines(index, delegate)
            if "shared_as" in delegate and first != method["name"]:
                yield f"    model: see method {first}"
            elif delegate.get("model"):
                yield from _model_lines(delegate["model"], "    ", every=every)


def _delegate_lines(index: int, delegate: Mapping[str, Any]) -> Iterator[str]:
    size = delegate.get("blob_bytes", delegate["bytes"])
    yield f"  delegate {index}: {delegate['backend']}, {console.size(size)}"
    options = delegate.get("options") or delegate["compile_specs"]
    yield f"    options: {', '.join(f'{k} {v}' for k, v in options.items() if v) or 'none'}"
    if "shared_as" in delegate:
        yield f"    shared: {delegate['shared_as']}, function {delegate['function']}"
    if "identifier" in delegate:
        yield f"    identifier: {delegate['identifier']}"
    if "python_reason" in delegate:
        reason = delegate["python_reason"]
        yield f"    calls here: {f'in Python, because {reason}' if reason else 'without Python'}"
    if "unreadable" in delegate:
        yield f"    {delegate['unreadable']}"


def _package_lines(summary: Mapping[str, Any], *, every: bool) -> Iterator[str]:
    yield f"{summary['file']}: {console.size(summary['bytes'])}"
    if "pipeline" in summary:
        yield from _pipeline_lines(summary["pipeline"], "  ", every=every)
    else:
        yield from _model_lines(summary["model"], "  ", every=every)


def _pipeline_lines(pipeline: Mapping[str, Any], indent: str, *, every: bool) -> Iterator[str]:
    for side in ("inputs", "outputs"):
        yield f"{indent}{side}: {', '.join(pipeline[side])}"
    for number, stage in enumerate(pipeline["models"], start=1):
        yield f"{indent}model {number}: {stage['type']}"
        if stage["type"] == "pipeline":
            yield from _pipeline_lines(stage, f"{indent}  ", every=every)
        elif "functions" in stage:
            yield from _model_lines(stage, f"{indent}  ", every=every)
        else:
            for name, value in stage.items():
                if name != "type" and value is not None:
                    yield f"{indent}  {name.replace('_', ' ')}: {json.dumps(value)}"


def _model_lines(model: Mapping[str, Any], indent: str, *, every: bool) -> Iterator[str]:
    weights = model["weights"]
    kinds = (
        f"{dtype} {entry['count']} ({console.size(entry['bytes'])})"
        for dtype, entry in weights["by_dtype"].items()
    )
    yield f"{indent}specification version {model['specification_version']}"
    yield f"{indent}weights: {', '.join(kinds) or 'none'}"
    yield from _weight_lines(weights, f"{indent}  ", every=every)
    for function in model["functions"]:
        target = function["deployment_target"] or "unknown target"
        yield f"{indent}function {function['name']}: {function['opset']} ({target})"
        for side in ("inputs", "outputs", "states"):
            if function[side]:
                yield f"{indent}  {side}: {', '.join(map(_named, function[side]))}"
        if "classifier" in function:
            yield f"{indent}  {_classifier(function['classifier'])}"
        yield f"{indent}  ops: {_counts(function['ops'])}"
        yield f"{indent}  results computed in: {_counts(function['computed_in'])}"
        yield f"{indent}  engine here: {function['engine'] or 'none'}"
        for engine, reasons in function["obstacles"].items():
            yield f"{indent}    not {engine}: {'; '.join(reasons)}"


def _weight_lines(weights: Mapping[str, Any], indent: str, *, every: bool) -> Iterator[str]:
    tensors = sorted(weights["tensors"], key=lambda tensor: -tensor["uncompressed_bytes"])
    if not tensors:
        return
    stored, uncompressed = weights["bytes"], weights["uncompressed_bytes"]
    if stored != uncompressed:
        share = f"{stored / uncompressed:.0%}" if uncompressed else "all"
        yield (
            f"{indent}{console.size(stored)} stored, "
            f"{console.size(uncompressed)} uncompressed ({share})"
        )
    listed = tensors if every else tensors[:_MAX_WEIGHTS]
    rows = [("weight", "shape", "scheme", "stored as", "bits", "stored", "uncompressed")]
    rows += [
        (
            tensor["name"],
            "x".join(map(str, tensor["shape"])) or "1",
            tensor["scheme"],
            tensor["stored_as"],
            f"{tensor['bits_per_weight']:.3g}",
            console.size(tensor["stored_bytes"]),
            console.size(tensor["uncompressed_bytes"]),
        )
        for tensor in listed
    ]
    yield console.columns(rows, indent=len(indent))
    if len(listed) < len(tensors):
        yield f"{indent}and {len(tensors) - len(listed)} smaller weights; --weights lists all"


def _classifier(classifier: Mapping[str, Any]) -> str:
    labels = classifier["labels"]
    first_labels = ", ".join(map(str, labels[:_MAX_LABELS])) + (
        ", ..." if len(labels) > _MAX_LABELS else ""
    )
    return (
        f"classifier: {classifier['label']}, one of {len(labels)} labels ({first_labels}), by "
        f"{classifier['probabilities']}"
    )


def _named(value: Mapping[str, Any]) -> str:
    return f"{value['name']} {_value(value)}"


def _value(value: Mapping[str, Any]) -> str:
    if "value" in value:
        return str(value["value"])
    # Programs take pixels as floats, but their callers pass and get pictures.
    kind = f"{value['image']} image" if "image" in value else value["dtype"]
    if "enumerated_shapes" in value:
        return f"{kind}{' | '.join(map(str, value['enumerated_shapes']))}"
    if "bounds" in value:
        return f"{kind}[{', '.join(map(_bound, value['bounds']))}]"
    sizes = [None] if value["shape"] is None else value["shape"]
    dims = ", ".join("?" if size is None else str(size) for size in sizes)
    bound = {"bounded": " at most", "unbounded": " unbounded"}.get(value.get("dynamism", ""), "")
    return f"{kind}[{dims}]{bound}"


def _bound(bounds: Sequence[int | None]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    if not total:
        return "none"
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{total} ({listed})"


COMMAND = Command(
    name="inspect",
    summary="show methods, delegates, MIL operations and weights",
    description="Show the methods and delegates of a .pte and the MIL functions, operations and "
    "weights of the models inside, and which engine would run them here.",
    add_arguments=add_arguments,
    run=run,
)
