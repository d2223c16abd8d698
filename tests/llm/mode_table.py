"""Writes the table of perplexities: ``PYTHONPATH=tests:. python -m tests.llm.mode_table``.

The model is a Llama over bytes that is trained here on the documentation strings of the standard
library, which takes minutes. Each mode is lowered in fp16 and evaluated on unseen strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support.docstrings import CONTEXT, END, texts, trained, untrained
from support.generated_sections import with_section
from support.lowering import fp32_specs
from support.quantization import few_bits
from torch import nn

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.evaluation import (
    Predict,
    perplexity,
    predict_with_program,
)
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.targets import Opset

PAGE = Path(__file__).parents[2] / "docs" / "llm.md"
STEPS, WIDTH, LAYERS = 600, 192, 4
TOKENS = 4096  # of unseen text
LAYOUT = Layout(256, CONTEXT, 8, CacheKind.IO, eos=(END,))

MODES: Mapping[str, str] = {
    "none": "fp16",
    "int8": "8 bits, a scale per output",
    "int8-group32": "8 bits, a scale for 32 inputs",
    "codebook-6-group16": "6 bits, a table for 16 outputs",
    "int4-group16": "4 bits, a scale for 16 inputs",
    "int4": "4 bits, a scale for 32 inputs",
    "int4-channel": "4 bits, a scale per output",
    "codebook-4-group16": "4 bits, a table for 16 outputs",
    "codebook-4": "4 bits, a table for each layer",
    "codebook-3-group16": "3 bits, a table for 16 outputs",
    "codebook-2-group16": "2 bits, a table for 16 outputs",
}
"""Modes of ``--quantize``, each with its meaning."""


@dataclass(frozen=True, slots=True)
class Row:
    """A mode, bits for each weight of linear layers, and the perplexity of the program."""

    mode: str
    bits: float
    perplexity: float


def _bits(decoder: Decoder) -> float:
    """Return the bits for each weight of the blocks' linear layers, with scales and tables."""
    stored = weights = 0.0
    for module in decoder.model.model.modules():
        if isinstance(module, nn.Linear):
            weight: torch.Tensor = module.weight.data
            weights += weight.numel()
            stored += _stored_bits(weight)
    return stored / weights


def _stored_bits(weight: torch.Tensor) -> float:
    """Return the bits of a weight in a program in fp16; symmetric weights have no offsets."""
    codes = getattr(weight, "codes", None)
    if codes is not None:
        table: torch.Tensor = weight.codebook  # pyright: ignore[reportAttributeAccessIssue]
        return codes.numel() * (table.shape[2] - 1).bit_length() + 16 * table.numel()
    scale = getattr(weight, "scale", None)
    if scale is not None:
        width = 4 if "int4" in str(weight.target_dtype) else 8  # pyright: ignore[reportAttributeAccessIssue]
        return weight.numel() * width + 16 * scale.numel()
    return 16 * weight.numel()


def _program(decoder: Decoder) -> Predict:
    specs = fp32_specs(compute_precision=Precision.FLOAT16, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_methods(decoder, LAYOUT), LAYOUT, partitioner).buffer
    return predict_with_program(Generator.load(program, engine="openvino"))


def _in_torch(decoder: Decoder) -> Predict:
    return lambda tokens, count: [decoder(torch.tensor([list(tokens)]))[0, -count:]]


def measure(modes: Sequence[str] = tuple(MODES)) -> tuple[float, list[Row]]:
    """Return the perplexity of the model in PyTorch and fp32, and a row for each mode."""
    model = trained(STEPS, WIDTH, LAYERS, length=CONTEXT)
    tokens = list(texts()[1][:TOKENS])
    rows: list[Row] = []
    with torch.no_grad():
        exact = perplexity(_in_torch(model), tokens, context=CONTEXT)
        for mode in modes:
            decoder = untrained(WIDTH, LAYERS)
            decoder.load_state_dict(model.state_dict())
            decoder.requires_grad_(False)
            quantize_weights(decoder, **few_bits(mode, group=32))
            bits = _bits(decoder)
            rows.append(Row(mode, bits, perplexity(_program(decoder), tokens, context=CONTEXT)))
    return exact, rows


def lines(exact: float, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| `--quantize` | weights of linear layers | bits | perplexity | to fp32 |"
    yield "|---|---|---:|---:|---:|"
    yield f"| | the checkpoint, fp32 in PyTorch | 32 | {exact:.3f} | |"
    for row in rows:
        change = f"{100 * (row.perplexity / exact - 1):+.1f} %".replace("-0.0", "+0.0")
        meaning = MODES[row.mode]
        yield f"| `{row.mode}` | {meaning} | {row.bits:.2f} | {row.perplexity:.3f} | {change} |"


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(), "perplexities of modes", lines(*measure())))
