"""``coreml-delegate run``: run a program on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import check_outputs, new_output
from coreml_delegate.scripts.commands import Command, add_path

if TYPE_CHECKING:
    from coreml_delegate.runtime.mil.program import Classifier

_TOP = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_program(parser)
    arguments.add_inputs(parser)
    arguments.add_execution(parser)
    arguments.add_data(parser)
    arguments.add_seed(parser, "random inputs")
    parser.add_argument(
        "--repeat", type=arguments.positive, default=10, help="timed runs (default: 10)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT.npz", help="write the outputs as arrays"
    )
    add_path(
        parser,
        "--etdump",
        "FILE",
        "write the times of all ops in as many further runs, for ExecuTorch's Inspector",
    )
    add_path(
        parser,
        "--debug-buffer",
        "FILE",
        "with --etdump: also write the values of all ops in one run",
    )
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.debug_buffer is not None and args.etdump is None:
        args.refuse_usage("--debug-buffer goes with --etdump")
    check_outputs((args.output, args.etdump, args.debug_buffer), force=args.force)
    from coreml_delegate.scripts.program_arguments import inputs_for, load_for, median_latency

    with console.step(f"Loading {args.program}"):
        program = load_for(args)
    inputs = inputs_for(args, program)
    with console.step("Running"):
        outputs = program.run(inputs)  # the first run; a stateful program is timed in later states
        latency = median_latency(program, inputs, args.repeat)
    if args.etdump is not None:
        _trace(args, inputs)
    if args.output is not None:
        _save(outputs, args.output, force=args.force)
    labels = {classifier.probabilities: classifier for classifier in program.classifiers}
    summaries = [_summary(name, tensor, labels.get(name)) for name, tensor in outputs.items()]
    if args.json:
        console.write_json({"outputs": summaries, "latency_ms": latency, "runs": args.repeat})
    else:
        _print(summaries, latency, args.repeat)
    return 0


def _trace(args: argparse.Namespace, inputs: list[Any]) -> None:
    """Run once more, in a program of its own, and write the events."""
    from coreml_delegate.scripts.program_arguments import DEBUG_BUFFER, load_for

    with console.step("Logging events"), ExitStack() as files:
        buffer_size = 0 if args.debug_buffer is None else DEBUG_BUFFER
        traced = load_for(args, enable_etdump=True, debug_buffer_size=buffer_size)
        for _ in range(1 if args.debug_buffer is not None else args.repeat):
            traced.run(inputs)
        etdump, values = traced.events()
        files.enter_context(new_output(args.etdump, force=args.force)).write(etdump)
        if args.debug_buffer is not None:
            files.enter_context(new_output(args.debug_buffer, force=args.force)).write(values)


def _save(outputs: Mapping[str, Any], path: Path, *, force: bool) -> None:
    import zipfile

    import numpy as np

    # np.savez takes names as keywords; some are its own parameters.
    with new_output(path, force=force) as file, zipfile.ZipFile(file, "w") as archive:
        for name, tensor in outputs.items():
            if tensor is not None:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, tensor.numpy(), allow_pickle=False)


def _summary(name: str, tensor: Any, classifier: Classifier | None) -> dict[str, Any]:
    from coreml_delegate.runtime.accuracy import is_class_scores
    from coreml_delegate.runtime.model import best_label

    if tensor is None:
        return {"name": name, "dtype": None, "shape": None}
    values = tensor.double()
    summary: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if values.numel():
        summary |= {
            "min": float(values.min()),
            "mean": float(values.mean()),
            "max": float(values.max()),
        }
    if classifier is not None or (is_class_scores(tensor) and tensor.numel() == tensor.shape[-1]):
        best = values.reshape(-1).topk(min(_TOP, values.numel()))
        indices = best.indices.tolist()
        labels = [{}] * len(indices)
        if classifier is not None:
            summary["label"] = {classifier.label: best_label(values, classifier)}
            labels = [{"label": classifier.labels[index]} for index in indices]
        summary["top"] = [
            {"class": index, "score": score, **label}
            for index, score, label in zip(indices, best.values.tolist(), labels, strict=True)
        ]
    return summary


def _print(summaries: list[dict[str, Any]], latency: float, runs: int) -> None:
    rows: list[tuple[str, ...]] = [("output", "dtype", "shape", "min", "mean", "max")]
    for summary in summaries:
        statistics_ = (
            f"{summary[key]:.6g}" if key in summary else "-" for key in ("min", "mean", "max")
        )
        kind = (str(summary["dtype"]), str(summary["shape"])) if summary["dtype"] else ("None", "-")
        rows.append((summary["name"], *kind, *statistics_))
    console.write(console.columns(rows))
    for summary in summaries:
        if "top" in summary:
            ranked = ", ".join(
                f"{t.get('label', t['class'])} ({t['score']:.6g})" for t in summary["top"]
            )
            console.write(f"{summary['name']} top {len(summary['top'])}: {ranked}")
        for name, label in summary.get("label", {}).items():
            console.write(f"{name}: {label}")
    console.write(f"latency: {latency:.3f} ms (median of {runs})")


COMMAND = Command(
    name="run",
    summary="run a .pte or .mlpackage on this machine",
    description="Run a .pte or .mlpackage on this machine and print its outputs and the "
    "median latency.",
    add_arguments=add_arguments,
    run=run,
)
