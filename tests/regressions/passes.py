"""Reports about graph passes and compression of weights in coremltools, after release 9.0."""

from __future__ import annotations

import torch
from ops.op_samples.sample import TensorArg, i, w, x
from torch.nn import functional

from regressions.record import COREMLTOOLS, Here, Regression, case, issues, released

_COMPRESSION = "tests/options/test_weight_compression.py"
_SQUARE = (w(3, 3), w(3))


def _normed(v: torch.Tensor, dims: tuple[int, ...], *affine: torch.Tensor) -> torch.Tensor:
    """A norm that is written out, with a scale and perhaps a shift."""
    centred = v - v.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(v.var(dims, unbiased=False, keepdim=True) + 1e-5)
    scaled = normal * affine[0]
    return scaled + affine[1] if len(affine) > 1 else scaled


def _positive(*shape: int) -> TensorArg:
    return x(*shape, low=0.5, high=1.5)


RECORDS = (
    Regression(
        released("9.0"),
        "What is subtracted from a convolution was negated in the memory of the model, so that the "
        "model itself, and the next program that was made of it, was wrong",
        Here.REPAIRED,
        "the negative is added, a constant of its own",
        (
            case(
                lambda v, c, k: functional.conv2d(v, k) - c,
                *(x(1, 2, 4, 4), w(3, 1, 1), w(3, 2, 1, 1)),
                note="subtracted",
            ),
            case(
                lambda v, c, k, b: functional.conv1d(v, k, b) - c + c * 2,
                *(x(1, 2, 4), w(1), w(3, 2, 1), w(3)),
                note="subtracted-and-used",
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2776),
        "A constant divided by a convolution became the convolution divided by the constant",
        Here.REPAIRED,
        "the pass that takes scales into weights leaves such quotients alone",
        (
            case(
                lambda v, c, k: c / functional.conv2d(v, k),
                *(_positive(1, 2, 4, 4), w(1, 3, 1, 1), w(3, 2, 1, 1, low=0.5)),
            ),
            case(
                lambda v, k: 2.0 / functional.conv1d(v, k),
                _positive(1, 2, 4),
                w(3, 2, 1, low=0.5),
                note="number",
            ),
            case(
                lambda v, c, k: functional.conv2d(v, k) / c,
                *(x(1, 2, 4, 4), w(1, 3, 1, 1, low=0.5), w(3, 2, 1, 1)),
                note="dividend",
            ),
            case(
                lambda v, c, k: functional.conv2d(v, k) * c,
                *(x(1, 2, 3, 3), w(1, 1, 3, 1), w(3, 2, 1, 1)),
                note="rows",
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2801),
        "A constant less a product was the product less the constant, and a constant matrix times "
        "an input plus a vector had the vector added to the other dimension",
        Here.REPAIRED,
        "the pass that makes linear layers leaves such products alone",
        (
            case(lambda v, m, c: m @ v + c, x(3, 3), *_SQUARE),
            case(lambda v, m, c: m @ v.t() - c, x(3, 3), *_SQUARE, note="transposed"),
            case(lambda v, m, c: m.t() @ v + c, x(3, 3), *_SQUARE, note="weight-transposed"),
            case(lambda v, m, c: c - m.t() @ v, x(3, 3), *_SQUARE, note="less"),
            case(lambda v, m, c: c - v @ m, x(3, 3), *_SQUARE, note="right"),
            case(lambda v, m, c: m @ v + c[:, None], x(3, 3), *_SQUARE, note="column"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2784),
        "A transpose was moved past `pow` and not applied to the exponents",
        Here.REPAIRED,
        "the pass over transposes stops at ops of two tensors",
        (
            case(lambda v, e: torch.pow(v.t(), e).t(), _positive(3, 3), w(values=[1.0, 2.0, 3.0])),
            case(lambda v, e: torch.pow(v.t(), e).t(), _positive(3, 2), w(3), note="failed"),
            case(lambda v, e: torch.pow(v.t(), e).t(), _positive(3, 3), x(3, 3), note="inputs"),
            case(lambda v: (v.t() ** 2).t(), x(3, 2), note="number"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2792),
        "A sum times a factor near the inverse of the count, or with more dimensions, became a "
        "mean without it",
        Here.REPAIRED,
        "the factor is the inverse, to a thousandth, and keeps the shape",
        (
            case(lambda v, k: v.sum(1) * k, x(2, 3), w(values=[[[1 / 3]]])),
            case(lambda v, k: v.sum(1) / k, x(2, 3), w(values=[[[3.0]]]), note="quotient"),
            case(lambda v: v.sum(-1) * 2.09e-5, x(2, 50176), note="near", fp16=False),
            case(lambda v: v.sum(-1) * 1e-3, x(2, 1000, low=-0.1, high=0.1), note="mean"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2789),
        "A one-hot matrix with its classes first times a matrix became rows of the matrix",
        Here.DELEGATED,
        "classes come last, and are transposed",
        (
            case(
                lambda v, m: (v[None] == torch.arange(4)[:, None]).float() @ m,
                *(i(values=[0, 3, 1, 1]), w(4, 3)),
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2807),
        "A norm that is written out took a scale of other dimensions for one of its own",
        Here.DELEGATED,
        "the cases pass it, and are right",
        (
            case(lambda v, g: _normed(v, (-1,), g), x(1, 2, 5), w(1)),
            case(lambda v, g: _normed(v, (-2, -1), g), x(1, 3, 4, 5), w(1, 1, 4, 1), note="rows"),
            case(
                lambda v, g, b: _normed(v, (-2, -1), g, b),
                *(x(1, 3, 3, 5), w(1, 1, 3, 1), w(1, 1, 3, 1)),
                note="as-many",
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2788),
        "Constants that are interleaved were folded one after the other",
        Here.DELEGATED,
        "the case folds among constants, and is right",
        (
            case(
                lambda v, a, b: torch.stack([a, b], 1).flatten(0, 1) + v,
                *(x(6, 2), w(3, 2), w(3, 2)),
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2759, 2760),
        "An exclusive `cumsum` of constants failed to fold",
        Here.NOT_CONCERNED,
        "PyTorch's is inclusive, and nothing here makes another",
    ),
    Regression(
        issues(COREMLTOOLS, 2804),
        "A loop that replaces a value by one from outside kept the first",
        Here.DELEGATED,
        "the case passes it, and is right",
        held_by="tests/e2e/test_control_flow.py::test_control_flow_is_delegated_as_a_whole",
    ),
    Regression(
        issues(COREMLTOOLS, 2786),
        "Two reads of a state were taken for one, whatever was written between them",
        Here.DELEGATED,
        "a state is read once, at the beginning, and written once, at the end",
        held_by="tests/e2e/test_states.py::test_calls_in_turn_equal_eager",
    ),
    Regression(
        issues(COREMLTOOLS, 2713),
        "A program that returns what it writes to a state crashed the device",
        Here.DELEGATED,
        "such a buffer does not become a state, and the report says so",
        held_by="tests/e2e/test_states.py::test_calls_in_turn_equal_eager",
    ),
    Regression(
        issues(COREMLTOOLS, 2675, 2677),
        "Below iOS18, GPU and neural engine dequantize weights of 8 bits with a sign wrongly",
        Here.REPAIRED,
        "they are stored without one, and with zero points to match",
        held_by=f"{_COMPRESSION}::test_weights_of_eight_bits_have_no_sign_below_ios18",
    ),
    Regression(
        issues(COREMLTOOLS, 2688),
        "Palettized weights with a scale for each channel crash on macOS 26",
        Here.REPAIRED,
        "the palette is scaled, not what is looked up in it; palettes of vectors convert as well",
        held_by=f"{_COMPRESSION}::test_scales_of_channels_are_in_the_table",
    ),
    Regression(
        issues(COREMLTOOLS, 2777),
        "A weight that could not be palettized after all was left divided by its scales",
        Here.REPAIRED,
        "its numbers are restored",
        held_by=f"{_COMPRESSION}::test_a_weight_whose_channels_do_not_fit_the_groups_is_left_as_it_is",
    ),
    Regression(
        issues(COREMLTOOLS, 2851, 2853),
        "Quantizing a row of zeros divided by zero",
        Here.DELEGATED,
        "whatever the integers are, a scale of zero gives zeros",
        held_by=f"{_COMPRESSION}::test_a_row_of_zeros_stays_one",
    ),
    Regression(
        issues(COREMLTOOLS, 2716),
        "Palettized weights of a large model gave random results, and crashed after some calls",
        Here.NOT_CONCERNED,
        "an error of the device, with no cause found; the weights that are written are right here",
    ),
    Regression(
        issues(COREMLTOOLS, 2650),
        "Attention that is written out was wrong on the GPU for a batch of ten or more",
        Here.NOT_CONCERNED,
        "an error of the device's compiler; products and softmax are right here",
        (
            case(
                lambda q, k, v, m: torch.softmax(q @ k.transpose(-1, -2) + m, -1) @ v,
                *(x(12, 2, 5, 4),) * 3,
                w(1, 2, 5, 5),
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2631),
        "A state whose width is no multiple of 32 fails on the neural engine",
        Here.NOT_CONCERNED,
        "an error of the device; `check` finds such states",
    ),
    Regression(
        issues(COREMLTOOLS, 2806),
        "`gather_nd` and `scatter_nd` compared indices with the wrong dimensions",
        Here.NOT_CONCERNED,
        "when they are told to validate them, which nothing here does",
    ),
    Regression(
        issues(COREMLTOOLS, 2670, 2671),
        "Calibrating quantized activations left gigabytes of temporary files",
        Here.NOT_CONCERNED,
        "activations are calibrated in PyTorch, by torchao",
    ),
    Regression(
        issues(COREMLTOOLS, 2698, 2700),
        "k-means of `coremltools.optimize.torch` kept too many clusters",
        Here.NOT_CONCERNED,
        "weights are palettized by `coremltools.optimize.coreml`, which has another",
    ),
    Regression(
        issues(COREMLTOOLS, 2676),
        "Outputs of neural networks could not be renamed alone",
        Here.NOT_CONCERNED,
        "of the format before ML programs",
    ),
    Regression(
        issues(COREMLTOOLS, 2764, 2767, 2793, 2849),
        "Classifiers with a dynamic batch, and empty ranges of sizes, were accepted",
        Here.NOT_CONCERNED,
        "delegates have no classes, and ranges come from `torch.export`, which checks them",
    ),
)
