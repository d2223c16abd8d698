"""Accuracy on real data: a network for handwritten digits, in every quantization, as it runs.

``python -m tests.benchmarks.quantization [--markdown]`` prints the table, and with ``--markdown``
puts it into ``docs/quantization.md`` too.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.digits import (
    BATCH,
    DigitsNet,
    accuracy,
    all_images,
    digits,
    predictions,
    train,
    trained,
)
from support.lowering import PRECISIONS
from support.quantization import config, convert_pt2e, exported, prepare_qat_pt2e
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, CoreMLQuantizer, runtime
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.weight_compression import OPTION
from coreml_delegate.partition.export import export_model, lower_methods
from coreml_delegate.quantization import QuantizationAssignment, mode_of
from coreml_delegate.quantization.apply import quantize_model
from coreml_delegate.quantization.configs import compile_keywords

_PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
_BEGIN, _END = "<!-- accuracy -->\n", "<!-- end of accuracy -->\n"
_MODES = (
    ("none", None),
    ("int8-static", "int8-static"),
    ("int8-weight", "int8-weight"),
    ("int4-weight", "int4-weight"),
    ("int4-group32 (only linear)", "int4-group32"),
    ("codebook-4 (only linear)", "codebook-4"),
    ("palettize-4", "palettize-4"),
)
_QAT_EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One way to quantize.

    Attributes:
        name: For the table.
        model: Accuracy in PyTorch of what was quantized, 0 to 1.
        fp32: Of the program computing in fp32.
        fp16: Of the program computing in fp16.
        flips: Images, of all there are, that the program (the worse of both) and the PyTorch model
            see differently.
        size: Of the fp16 program in bytes.
    """

    name: str
    model: float
    fp32: float
    fp16: float
    flips: int
    size: int


def rows(chosen: Sequence[str] = ()) -> Iterator[Row]:
    """Measure; all, or those whose name has one of the texts in it."""
    recipes: list[tuple[str, Callable[[], Row]]] = [
        (name, lambda name=name, mode=mode: _by_mode(name, mode)) for name, mode in _MODES
    ]
    recipes.append(("int8-static, trained (QAT)", _trained))
    for name, measure in recipes:
        if not chosen or any(text in name for text in chosen):
            yield measure()


def _by_mode(name: str, mode_name: str | None) -> Row:
    data = digits()
    source = SourceModel(copy.deepcopy(trained()), (data.test[:BATCH],), {}, None)
    if mode_name is None:
        return _row(name, source, {})
    mode = mode_of(mode_name)
    samples = [[batch] for batch in data.train.split(BATCH)[:6]]
    assignment = QuantizationAssignment(mode)
    quantized = quantize_model(source, assignment, samples).source
    return _row(name, quantized, compile_keywords(assignment, None))


def _trained() -> Row:
    data = digits()
    inputs = (data.test[:BATCH],)
    quantizer = CoreMLQuantizer(config(milestones=[0, 4, 24, 16]))
    model: nn.Module = copy.deepcopy(trained(norms=False)).train()
    prepared = prepare_qat_pt2e(exported(model, inputs), quantizer)
    schedule = quantizer.schedule(prepared)
    train(prepared, _QAT_EPOCHS, size=BATCH, rate=1e-4, before_step=schedule.step)
    from torchao.quantization.pt2e import move_exported_model_to_eval

    converted = convert_pt2e(move_exported_model_to_eval(prepared))
    program = torch.export.export(converted, inputs)
    return _row("int8-static, trained (QAT)", SourceModel(converted, inputs, {}, program), {})


def _row(name: str, source: SourceModel, keywords: dict[str, Any]) -> Row:
    programs = {precision: _program(source, precision, keywords) for precision in PRECISIONS}
    actual = {p: _predictions(buffer, "openvino") for p, buffer in programs.items()}
    if OPTION in keywords:  # the module is not compressed, and clusters depend on the precision
        expected = {p: _predictions(buffer, "reference") for p, buffer in programs.items()}
    else:
        expected = dict.fromkeys(programs, predictions(source.module, all_images()))
    return Row(
        name,
        accuracy(expected[Precision.FLOAT32]),
        accuracy(actual[Precision.FLOAT32]),
        accuracy(actual[Precision.FLOAT16]),
        max(int((actual[p] != expected[p]).sum()) for p in programs),
        len(programs[Precision.FLOAT16]),
    )


def _program(source: SourceModel, precision: Precision, keywords: dict[str, Any]) -> bytes:
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision, **keywords),
        strict=True,
    )
    return lower_methods({"forward": export_model(source)}, partitioner).buffer


def _predictions(pte: bytes, engine: str) -> np.ndarray:
    program = runtime.load_program(pte, engine=engine)
    return predictions(lambda batch: program.run("forward", [batch])[0], all_images())


def float_accuracy() -> dict[bool, float]:
    """Accuracy of the float networks, with norms (True) and without."""
    return {norms: accuracy(predictions(trained(norms=norms))) for norms in (True, False)}


def markdown(measured: Sequence[Row]) -> str:
    """The table, with what it is about in front of it."""
    eager = float_accuracy()
    images = len(digits().test)
    lines = [
        f"A network of two convolutions and a linear layer ({_parameters()} parameters) on "
        f"{images} images of scikit-learn's digits that it was not trained on; in float, eager "
        f"PyTorch recognizes {eager[True]:.2%} ({eager[False]:.2%} without batch norms, which the "
        f"trained row starts from). Flips are the images, of all {len(all_images())}, that the "
        "program and the lowered PyTorch model classify differently, in fp32 or in fp16, "
        "whichever are more. `palettize-4` is "
        "applied after conversion: its PyTorch column is the reference engine, which runs the same "
        "program op by op.",
        "",
        "| quantization | PyTorch model | program, fp32 | program, fp16 | flips | `.pte` |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.model:.2%} | {row.fp32:.2%} | {row.fp16:.2%} | {row.flips} "
        f"| {row.size / 1000:.1f} kB |"
        for row in measured
    ]
    return "\n".join(lines) + "\n"


def _parameters() -> int:
    return sum(parameter.numel() for parameter in DigitsNet().parameters())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.quantization", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="TEXT", help="rows whose name has TEXT in it")
    parser.add_argument(
        "--markdown", action="store_true", help="also put the table into docs/quantization.md"
    )
    arguments = parser.parse_args()
    if arguments.markdown and arguments.names:
        parser.error("--markdown writes the whole table: leave TEXT out")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    table = markdown(list(rows(arguments.names)))
    print(table)
    if arguments.markdown:
        before, _, rest = _PAGE.read_text().partition(_BEGIN)
        _, _, after = rest.partition(_END)
        _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}")


if __name__ == "__main__":
    main()
