"""Placements that issues and reports show, beside what the rules predict.

``python -m tests.device_check.public_plans`` writes the table of ``docs/evidence.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.generated_sections import with_section
from support.mil import Opset, build, mb

from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.device_check.compute_plan import PlannedOp, Processor, compare_plan
from coreml_delegate.runtime.mil.program import Program

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
CPU, GPU, NE = Processor

HALF, SINGLE = np.float16, np.float32


@dataclass(frozen=True)
class Observation:
    """Operations that run on one processor in a plan or report that somebody published.

    Attributes:
        model: The model, and what it computes in.
        device: The device and its system, as far as the source says.
        count: Number of operations; None if the source does not say.
        types: Their op types.
        runs_on: The processor that Core ML prefers.
        program: Makes a small program with operations of these types.
        source: Title and address.
        supported: Whether the neural engine supports them; None if the source does not say.
    """

    model: str
    device: str
    count: int | None
    types: tuple[str, ...]
    runs_on: Processor
    program: Callable[[], Program]
    source: tuple[str, str]
    supported: bool | None = None

    @property
    def leaves(self) -> bool:
        """Whether the operations run on another processor than the neural engine."""
        return self.runs_on is not NE

    def predictions(self) -> dict[str, tuple[str, ...]]:
        """The rules that predict that an operation leaves the neural engine, by its type."""
        model = CheckedModel(self.program(), (Use("model", "main"),))
        (view,) = model.views
        planned = [
            PlannedOp("main", op.type, op.outputs[0].name, self.runs_on, (), None)
            for op in view.ops
            if op.type in self.types
        ]
        compared = compare_plan(planned, check([model]), "model")
        return {entry.planned.op_type: entry.predicted for entry in compared}


def of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = HALF) -> Program:
    """A program of ``function`` on inputs of these shapes."""
    names = "xyz"[: len(shapes)]
    inputs = {name: np.zeros(s, dtype) for name, s in zip(names, shapes, strict=True)}
    return build(function, inputs, Opset.iOS18)


def selection() -> Program:
    """The best anchors of a detector, and their boxes."""

    def function(x: Any, y: Any) -> Any:
        _, indices = mb.topk(x=x, k=4, axis=1)
        repeated = mb.tile(x=mb.expand_dims(x=indices, axes=[2]), reps=(1, 1, 4))
        return mb.gather_along_axis(x=y, indices=repeated, axis=1)

    return of(function, (1, 128), (1, 128, 4))


def transformer(dtype: Any = HALF) -> Program:
    """One op of each type of a vision transformer with convolutions."""
    weight = np.ones((32, 32), dtype)

    def function(x: Any) -> Any:
        kernel = np.ones((32, 32, 2, 2), dtype)
        y = mb.relu(x=mb.conv(x=x, weight=kernel, strides=(2, 2), pad_type="valid"))
        y = mb.upsample_bilinear(x=y, scale_factor_height=2.0, scale_factor_width=2.0)
        y = mb.transpose(x=mb.reshape(x=y, shape=(1, 32, 1024)), perm=(0, 2, 1))
        y = mb.layer_norm(x=y, axes=[-1])
        scores = mb.mul(x=mb.matmul(x=y, y=y, transpose_y=True), y=dtype(0.5))
        y = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=y)
        y = mb.gelu(x=mb.linear(x=mb.add(x=y, y=dtype(1.0)), weight=weight))
        return mb.concat(values=(y, y), axis=-1)

    return of(function, (1, 32, 32, 32), dtype=dtype)


def decoder() -> Program:
    """Attention by einsum, with a normalization that is written out."""

    def function(x: Any, y: Any) -> Any:
        scores = mb.einsum(values=(x, y), equation="nchw,nwhu->nchu")
        mean = mb.reduce_mean(x=scores, axes=[1], keep_dims=True)
        deviation = mb.sub(x=scores, y=mean)
        scale = mb.sqrt(x=mb.reduce_mean(x=mb.square(x=deviation), axes=[1], keep_dims=True))
        return mb.softmax(x=mb.real_div(x=deviation, y=scale), axis=1)

    return of(function, (1, 32, 2, 16), (1, 16, 2, 32))


def product(size: int) -> Callable[[], Program]:
    """A product in fp16 of matrices that come and go in fp32."""

    def function(x: Any, y: Any) -> Any:
        a, b = mb.cast(x=x, dtype="fp16"), mb.cast(x=y, dtype="fp16")
        return mb.cast(x=mb.matmul(x=a, y=b), dtype="fp32")

    return lambda: of(function, (size, size), (size, size), dtype=SINGLE)


def attention(dtype: Any, heads: int, length: int, width: int) -> Callable[[], Program]:
    """Attention as one op."""
    shape = (1, heads, length, width)

    def function(x: Any, y: Any, z: Any) -> Any:
        return mb.scaled_dot_product_attention(query=x, key=y, value=z)

    return lambda: of(function, shape, shape, shape, dtype=dtype)


def embedding() -> Program:
    """A look-up of tokens in GPT-2's table; its values are zeros here."""
    table = np.zeros((50257, 8), HALF)

    def function(x: Any) -> Any:
        return mb.gather(x=table, indices=x, axis=0)

    return build(function, {"x": np.zeros((1, 64), np.int32)}, Opset.iOS16)


def quantized() -> Program:
    """A layer whose weight has 8 bits and one scale for each output channel."""

    def function(x: Any) -> Any:
        weight = mb.constexpr_blockwise_shift_scale(
            data=np.ones((32, 32), np.int8), scale=np.ones((32, 1), HALF)
        )
        return mb.linear(x=x, weight=weight)

    return of(function, (1, 64, 32))


def preprocessing() -> Program:
    """Scale and bias of a picture in fp32, in front of a network in fp16."""

    def function(x: Any) -> Any:
        scaled = mb.add(x=mb.mul(x=x, y=SINGLE(0.5)), y=SINGLE(-1.0))
        half = mb.cast(x=scaled, dtype="fp16")
        return mb.relu(x=mb.conv(x=half, weight=np.ones((32, 3, 3, 3), HALF)))

    return of(function, (1, 3, 32, 32), dtype=SINGLE)


def recurrent() -> Program:
    """A layer of LSTM."""

    def function(x: Any) -> Any:
        weights = {"weight_ih": np.ones((64, 8), HALF), "weight_hh": np.ones((64, 16), HALF)}
        zeros = np.zeros((1, 16), HALF)
        return mb.lstm(x=x, initial_h=zeros, initial_c=zeros, bias=zeros[0].repeat(4), **weights)

    return of(function, (5, 1, 8))


RF_DETR = ("roboflow/rf-detr#1495", "https://github.com/roboflow/rf-detr/pull/1495")
SEGFORMER = (
    "troobit/medata, report of Xcode",
    "https://github.com/troobit/medata/blob/b2b87a110d6b158cf8c15e074f5f6428292e4fa2/specs/"
    "estimation/segmenter-foundation/artifacts/spike_segformer-you.mlperf/report.json",
)
NDT = (
    "D0NMEGA/Cortex, report of Xcode",
    "https://github.com/D0NMEGA/Cortex/blob/c8696df3bddb22763ef60999cd12217036b0be99/.planning/"
    "phases/05-ndt1-coreml-deployment-with-ane-residency-verified/runtime_plan_ipad.json",
)
VX = "https://github.com/vx-lang/Vx/issues"
INSPECT = ("smpanaro/CoreMLInspect", "https://github.com/smpanaro/CoreMLInspect")
NOTCH = ("stablehlo-coreml#110", "https://github.com/kasper0406/stablehlo-coreml/pull/110")
PROFILING = (
    "freedomtan/coreml_modelc_profling",
    "https://github.com/freedomtan/coreml_modelc_profling",
)
RECURRENT = ("coremltools#337", "https://github.com/apple/coremltools/issues/337")
ATTENTION = ("scaled_dot_product_attention",)
PRODUCT = ("cast", "matmul")

OBSERVATIONS = (
    Observation(
        "RF-DETR Nano in fp16, selection of boxes",
        "M3 Pro, macOS 27.0",
        7,
        ("topk", "expand_dims", "tile", "gather_along_axis"),
        CPU,
        selection,
        RF_DETR,
    ),
    Observation(
        "MobileNet-EdgeTPU, in front of the cast to fp16",
        "a Mac",
        2,
        ("mul", "add"),
        CPU,
        preprocessing,
        PROFILING,
    ),
    Observation("several LSTMs", "iPhone XS", None, ("lstm",), CPU, recurrent, RECURRENT),
    Observation(
        "attention of 1 x 32 x 1024 x 128 in fp32",
        "a Mac",
        1,
        ATTENTION,
        CPU,
        attention(SINGLE, 32, 1024, 128),
        ("vx-lang/Vx#437", f"{VX}/437"),
    ),
    Observation(
        "attention of 1 x 16 x 2048 x 64 in fp16",
        "a Mac",
        1,
        ATTENTION,
        NE,
        attention(HALF, 16, 2048, 64),
        ("vx-lang/Vx#437", f"{VX}/437"),
        supported=True,
    ),
    Observation(
        "SegFormer-B0 in fp16, the whole model",
        "iPhone 16 Pro, iOS 26.5",
        315,
        (
            *("conv", "linear", "matmul", "layer_norm", "softmax", "gelu", "transpose", "reshape"),
            *("upsample_bilinear", "relu", "concat", "add", "mul"),
        ),
        NE,
        transformer,
        SEGFORMER,
        supported=True,
    ),
    Observation(
        "product of 512 x 512 matrices in fp16",
        "M4",
        4,
        PRODUCT,
        NE,
        product(512),
        ("vx-lang/Vx#435", f"{VX}/435"),
        supported=True,
    ),
    Observation(
        "product of 4 x 4 matrices in fp16",
        "a Mac",
        4,
        PRODUCT,
        CPU,
        product(4),
        ("vx-lang/Vx#436", f"{VX}/436"),
        supported=True,
    ),
    Observation(
        "attention of 1 x 16 x 1024 x 64 in fp16",
        "a Mac",
        1,
        ATTENTION,
        CPU,
        attention(HALF, 16, 1024, 64),
        ("vx-lang/Vx#437", f"{VX}/437"),
    ),
    Observation(
        "NDT1 of 1.3 million parameters, the whole model",
        "iPad Air M2, iPadOS 18.7",
        226,
        ("einsum", "reduce_mean", "sub", "square", "sqrt", "real_div", "softmax"),
        CPU,
        decoder,
        NDT,
        supported=True,
    ),
    Observation(
        "GPT-2 in fp16, look-up of tokens",
        "a Mac",
        1,
        ("gather",),
        GPU,
        embedding,
        INSPECT,
        supported=False,
    ),
    Observation(
        "layers with weights of 8 bits",
        "a Mac",
        None,
        ("linear",),
        CPU,
        quantized,
        NOTCH,
        supported=False,
    ),
)
"""Public observations, those that agree with the rules first."""


def agreement(observation: Observation) -> str:
    """Whether the rules predict the observation: ``yes``, ``no``, or the types that they miss."""
    predictions = observation.predictions()
    assert predictions.keys() == set(observation.types)
    wrong = [op for op, rules in predictions.items() if bool(rules) != observation.leaves]
    if not wrong:
        return "yes"
    return "no" if len(wrong) == len(predictions) else f"except `{'`, `'.join(wrong)}`"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    heads = (
        "observed",
        "on",
        "operations",
        "run on",
        "supported there",
        "rules",
        "agree",
        "source",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    says = {None: "unknown", False: "no", True: "yes"}
    for o in OBSERVATIONS:
        rules = dict.fromkeys(rule for own in o.predictions().values() for rule in own)
        title, address = o.source
        cells = (
            *(o.model, o.device),
            (f"{o.count}: " if o.count else "") + ", ".join(f"`{name}`" for name in o.types),
            *(o.runs_on.value, says[o.supported]),
            ", ".join(f"`{rule}`" for rule in rules) or "none",
            *(agreement(o), f"[{title}]({address})"),
        )
        yield f"| {' | '.join(cells)} |"


def page(text: str) -> str:
    """Return the document with the table of today."""
    return with_section(text, "public plans", rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
