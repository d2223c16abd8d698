"""Reports about shapes, indices and layers in coremltools' converter, after release 9.0."""

from __future__ import annotations

import torch
from ops.op_samples.sample import i, w, x
from torch.nn import functional

from regressions.record import COREMLTOOLS, Here, Regression, case, issues, released

_STATES = "tests/e2e/test_states.py::test_calls_in_turn_equal_eager"
_MASK = w(values=[[True, False, False], [True, True, False], [True, True, True]], dtype=torch.bool)
_RNN = (3, 4)


def _constant_attention(q: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Attention among constants, which is folded, added to an input."""
    return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask) + scores


def _squeezed_constant(constant: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return constant.squeeze(1).narrow(0, 1, 2) + v


def _scattered_constant(
    table: torch.Tensor, index: torch.Tensor, values: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return table.scatter_add(0, index, values) + v


def _parts_of_a_stack(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    stack = torch.stack([a, b])
    return stack[0] * 2, stack[1] + stack[0], stack


def _meshgrid(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    first, second = torch.meshgrid(rows / 2, columns / 2, indexing="ij")
    return first * 10 + second


def _twice(
    v: torch.Tensor, h: torch.Tensor, c: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    """Two layers of LSTM, used twice."""
    state = (h, c)
    for _ in range(2):
        out, *state = torch.lstm(v, state, weights, True, 2, 0.0, False, False, True)
    return out


def _lstm_weights() -> list:
    size, hidden = _RNN
    shapes = [(4 * hidden, size), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    return [w(*shape) for shape in (*shapes, (4 * hidden, hidden), *shapes[1:])]


def _batch_last(v: torch.Tensor) -> torch.Tensor:
    """A dynamic batch: of these inputs the last dimension is."""
    return v.transpose(0, -1)


RECORDS = (
    Regression(
        issues(COREMLTOOLS, 2682, 2565, 2765),
        "`diagonal` kept the matrix and zeroed the rest of it",
        Here.DELEGATED,
        "elements at equal distances of the flattened matrix",
        (
            case(torch.diagonal, x(5, 5)),
            case(torch.diagonal, x(3, 4), 1, note="above"),
            case(torch.diagonal, x(2, 4, 3), -1, 2, 1, note="below"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2774),
        "`narrow` from a negative start to the end was empty",
        Here.DELEGATED,
        "a slice that `torch.export` makes of it",
        (
            case(torch.narrow, x(2, 3, 4), -1, -1, 1),
            case(torch.narrow, x(2, 3, 4), 1, -2, 2, note="two"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2778, 2838),
        "`roll` of a dynamic dimension gave the input itself for a negative shift, and failed at "
        "run time for others",
        Here.REFUSED,
        "the device has another remainder of negative numbers than coremltools, and does not make "
        "the range of indices, so the CPU does",
        (
            case(torch.roll, x(3, 5), -1, -1, dynamic=True),
            case(torch.roll, x(3, 5), 2, 1, dynamic=True, note="right"),
        ),
        refused={"operator.mod": "no Core ML translation of operator.mod is known"},
    ),
    Regression(
        issues(COREMLTOOLS, 2778),
        "`roll` of a static dimension, which was right",
        Here.DELEGATED,
        "coremltools knows the remainder",
        (case(torch.roll, x(3, 5), -8, 1, note="static"),),
    ),
    Regression(
        issues(COREMLTOOLS, 2626, 2222),
        "From iOS17 in fp16, integers were gathered as 16 bits without a sign",
        Here.DELEGATED,
        "the pass that narrows them does not run",
        (
            case(lambda v, n: v[n], i(values=[4, -12, -21, 70000]), i(values=[1, 3, -2])),
            case(torch.gather, i(values=[[4, -12, 9]]), 1, i(values=[[1, 1, 0]]), note="along"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2841),
        "`gather` by indices smaller than the input failed to convert",
        Here.DELEGATED,
        "the input is cut to the part that the indices span",
        (case(torch.gather, x(3, 3), 1, i(values=[[0, 1], [1, 0]])),),
    ),
    Regression(
        issues(COREMLTOOLS, 2844, 2772),
        "`avg_pool` with `ceil_mode` divided windows beyond the edge by the whole kernel",
        Here.DELEGATED,
        "the divisors are computed",
        (
            case(functional.avg_pool2d, x(1, 1, 7, 7), 2, 3, ceil_mode=True),
            case(functional.avg_pool1d, x(1, 1, 7), 2, 3, ceil_mode=True, note="1d"),
            case(functional.avg_pool2d, x(1, 1, 3, 3), 2, 2, 1, ceil_mode=True, note="padded"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2748, 2745),
        "`avg_pool` with `divisor_override` failed to convert",
        Here.DELEGATED,
        "the average is scaled",
        (case(functional.avg_pool2d, x(1, 2, 4, 4), 2, divisor_override=3),),
    ),
    Regression(
        issues(COREMLTOOLS, 2855),
        "`scaled_dot_product_attention` with `enable_gqa` failed to convert",
        Here.DELEGATED,
        "ExecuTorch decomposes that form",
        (
            case(
                functional.scaled_dot_product_attention,
                x(1, 4, 3, 8),
                x(1, 2, 3, 8),
                x(1, 2, 3, 8),
                enable_gqa=True,
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2864),
        "With `scale`, attention was translated to products and a softmax",
        Here.DELEGATED,
        "as there: its numbers are right",
        (
            case(
                functional.scaled_dot_product_attention,
                *(x(1, 2, 3, 8),) * 3,
                scale=0.25,
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2802),
        "Folded among constants, attention lost its mask and `scatter_add` overwrote",
        Here.REPAIRED,
        "neither is folded",
        (
            case(_constant_attention, w(1, 1, 3, 4), _MASK, x(1, 1, 3, 4)),
            case(
                _scattered_constant,
                w(values=[1.0, 2.0, 3.0]),
                w(values=[0, 2], dtype=torch.int64),
                w(values=[10.0, 20.0]),
                x(3),
                note="scatter",
            ),
            case(
                lambda table, index, values, v: table.scatter_add(1, index, values) * v,
                w(2, 3),
                w(values=[[0, 2, 0]], dtype=torch.int64),
                w(2, 4),
                x(2, 3),
                note="scatter-part",
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2803),
        "Folded among constants, `squeeze` and slices by size had other shapes than declared",
        Here.DELEGATED,
        "the case folds among constants, and is right",
        (case(_squeezed_constant, w(4, 1, 1), x(2, 3)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2665),
        "`meshgrid` of quotients failed to convert",
        Here.DELEGATED,
        "`torch.export` decomposes it",
        (case(_meshgrid, x(3), x(4)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2818),
        "Bicubic resizing did not convert",
        Here.DELEGATED,
        "ExecuTorch decomposes it",
        (case(functional.interpolate, x(1, 1, 4, 4), scale_factor=2, mode="bicubic"),),
    ),
    Regression(
        issues(COREMLTOOLS, 2643),
        "An LSTM of two layers that a model uses twice failed to convert",
        Here.DELEGATED,
        "each use is one `lstm` for each layer",
        (case(_twice, x(2, 1, 3), x(2, 2, 4), x(2, 2, 4), *_lstm_weights()),),
    ),
    Regression(
        issues(COREMLTOOLS, 2644, 2706),
        "`einsum` of rotary attention failed to convert",
        Here.DELEGATED,
        "two operands and all dimensions named, as the rule wants",
        (
            case(lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), x(1, 2, 3, 4), x(1, 2, 5, 4)),
            case(lambda a, b: torch.einsum("...,f->...f", a, b), x(2, 3), w(4), note="dots"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2572, 2276),
        "Batch normalization in three dimensions crashed the device's GPU compiler",
        Here.NOT_CONCERNED,
        "an error of the device, which neither engine here has",
        (
            case(
                functional.batch_norm,
                x(1, 3, 4, 4, 4),
                w(3),
                w(3, low=0.5, high=2.0),
                w(3),
                w(3),
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2667),
        "Instance normalization in three dimensions crashed on the device's GPU",
        Here.DELEGATED,
        "means and products, without the op that crashed",
        (case(functional.instance_norm, x(1, 3, 4, 4, 4)),),
    ),
    Regression(
        released("9.1.dev1"),
        "A pass over stacked and split tensors took one use of a part for all",
        Here.DELEGATED,
        "the cases pass it, and are right",
        (
            case(lambda a, b: torch.stack([a, b]).unbind(), x(3), x(3), note="unbind"),
            case(_parts_of_a_stack, x(3), x(3), note="parts"),
        ),
    ),
    Regression(
        released("9.1.dev1"),
        "Products of vectors had wrong shapes, and integer weights became linear layers",
        Here.DELEGATED,
        "ExecuTorch makes matrices of the vectors; products of integers stay on the CPU",
        (
            case(torch.matmul, x(3), x(3, 4), note="vector-by-matrix"),
            case(torch.matmul, x(4, 3), x(3), note="matrix-by-vector"),
            case(torch.dot, x(3), x(3), note="dot"),
        ),
    ),
    Regression(
        released("9.1.dev1"),
        "An ellipsis in `einsum` failed to convert",
        Here.DELEGATED,
        "ExecuTorch decomposes that form",
        (case(lambda a, b: torch.einsum("...i,ij->...j", a, b), x(2, 3, 4), x(4, 5), note="dots"),),
    ),
    Regression(
        (*issues(COREMLTOOLS, 2736), *released("9.1.dev1")),
        "The shift of `layer_norm` was checked by the shape of its scale",
        Here.DELEGATED,
        "a shift alone is added",
        (case(lambda v, b: functional.layer_norm(v, (4,), None, b), x(2, 4), w(4), note="shift"),),
    ),
    Regression(
        released("9.1.dev1"),
        "Weights quantized with zero points that are floats were dequantized with others",
        Here.DELEGATED,
        "weights are dequantized by an op of our own",
        held_by="tests/ops/test_compressed_rules.py::test_compressed_weights_are_delegated",
    ),
    Regression(
        issues(COREMLTOOLS, 2826),
        "A state began with zeros, whatever its buffer held",
        Here.DELEGATED,
        "until the first run has ended, reads give the initial values",
        held_by=_STATES,
    ),
    Regression(
        issues(COREMLTOOLS, 2589),
        "Below iOS18 the scales of dequantized weights were taken along another dimension",
        Here.DELEGATED,
        "weights are dequantized by an op of our own",
        held_by="tests/ops/test_compressed_rules.py::test_compressed_weights_are_delegated",
    ),
    Regression(
        issues(COREMLTOOLS, 2632, 2633, 2754, 2755),
        "With NumPy 2.4 constants failed to convert",
        Here.DELEGATED,
        "the tests run with NumPy 2.4; a partition that fails to convert would stay on the CPU",
        (
            case(lambda v, c: v.view(1, -1, int(c.numel() * 2)), x(2, 6), w(3)),
            case(functional.softplus, x(2, 3), 2.0, 5.0, note="softplus"),
            case(functional.threshold, x(2, 3), 0.1, 20.0, note="threshold"),
            case(functional.pad, x(2, 3), (1, 2), value=0.5, note="pad"),
            *(
                case(functional.interpolate, x(1, 2, *size), scale_factor=2, mode=mode, note=mode)
                for mode, size in (("linear", (5,)), ("bilinear", (5, 4)), ("nearest", (5, 4)))
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2781, 2002),
        "`prelu` with a slope for each channel failed to convert for two or three dimensions",
        Here.DELEGATED,
        "computed of other ops",
        tuple(
            case(functional.prelu, x(*shape), w(3), note=f"rank-{len(shape)}")
            for shape in ((2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 3, 2, 4, 5))
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2808),
        "`group_norm` and `narrow` failed to convert with a dynamic batch",
        Here.REPAIRED,
        "the groups are normed as layers",
        (
            case(lambda v: functional.group_norm(_batch_last(v), 2), x(5, 4, 6, 3), dynamic=True),
            case(
                lambda v, a, b: functional.group_norm(_batch_last(v), 2, a, b),
                *(x(5, 4, 2, 3, 3), w(4), w(4)),
                dynamic=True,
                note="scaled",
            ),
            case(functional.group_norm, x(2, 4, 6), 2, dynamic=True, note="width"),
            case(lambda v: _batch_last(v).narrow(1, 1, 2), x(5, 4, 3), dynamic=True, note="narrow"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2787),
        "Adaptive pooling to one element failed to convert for a dynamic length",
        Here.DELEGATED,
        "means and maxima of whole dimensions",
        (
            case(functional.adaptive_avg_pool1d, x(1, 4, 9), 1, dynamic=True),
            case(functional.adaptive_max_pool1d, x(1, 4, 9), 1, dynamic=True, note="max"),
            case(functional.adaptive_avg_pool2d, x(1, 4, 9, 5), 1, dynamic=True, note="2d"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2825),
        "With a dynamic length, a mean under a mask crashes on the GPU and the neural engine",
        Here.REPAIRED,
        "a mask is repeated by numbers, so that no size depends on values",
        (
            case(
                lambda v: ((v[:1] > 0).expand(v.size()).float() * v).sum(1),
                x(4, 5),
                dynamic=True,
            ),
        ),
        held_by="tests/e2e/test_dynamic_shapes.py::test_a_mean_under_a_mask_has_a_known_size",
    ),
    Regression(
        issues(COREMLTOOLS, 2785),
        "`layer_norm` over a dynamic dimension failed to convert",
        Here.REFUSED,
        "a scale of that dimension would have a dynamic shape",
        (case(lambda v: functional.layer_norm(v, v.shape[-1:]), x(2, 5), dynamic=True),),
        refused={"aten.native_layer_norm.default": "'normalized_shape' is computed from shapes"},
    ),
    Regression(
        issues(COREMLTOOLS, 2791),
        "Resizing a dynamic image to a fixed size failed to convert",
        Here.REFUSED,
        "coremltools fails to translate it",
        (case(functional.interpolate, x(1, 2, 8, 6), (4, 4), mode="bilinear", dynamic=True),),
        refused={"aten.upsample_bilinear2d.vec": "coremltools fails to convert this call"},
    ),
    Regression(
        issues(COREMLTOOLS, 2837, 2840),
        "Resizing a sequence to a multiple of its dynamic length failed to convert",
        Here.REFUSED,
        "ExecuTorch computes the scale from sizes, as a float",
        (
            case(
                lambda v: functional.interpolate(v, size=2 * v.shape[-1]) * 2,
                x(1, 4, 6),
                dynamic=True,
            ),
        ),
        refused={"operator.truediv": "no Core ML translation of operator.truediv is known"},
    ),
    Regression(
        issues(COREMLTOOLS, 2799),
        "`unflatten` to sizes of the input failed to convert",
        Here.DELEGATED,
        "a reshape to sizes of the input",
        (
            case(lambda v: v.unflatten(-1, (v.shape[-1], 1)), x(4, 5), dynamic=True),
            case(
                lambda v: v.t().unflatten(0, (v.shape[-1], 1)), x(4, 5), dynamic=True, note="first"
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2810),
        "`cross` without a dimension was taken along the first",
        Here.DELEGATED,
        "`torch.export` gives the first dimension of size 3",
        (
            case(torch.cross, x(2, 3), x(2, 3)),
            case(torch.cross, x(2, 3, 4), x(2, 3, 4), note="middle"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2846, 2137),
        "`tensordot` did not convert",
        Here.DELEGATED,
        "`torch.export` decomposes it",
        (
            case(torch.tensordot, x(2, 3, 4), w(3, 4, 5), 2),
            case(torch.tensordot, x(2, 3, 4), w(4, 5), ([-1], [0]), note="dimensions"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2715, 2226),
        "`tensor_split` did not convert",
        Here.DELEGATED,
        "`torch.export` decomposes it",
        (
            case(torch.tensor_split, x(2, 7), 3, 1),
            case(torch.tensor_split, x(2, 7), (1, -2), 1, note="at"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2672, 2599),
        "`unfold` of a tensor did not convert",
        Here.DELEGATED,
        "the windows are slices",
        (case(lambda v: v.unfold(1, 3, 2), x(2, 9)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2723, 2148),
        "Pooling without a batch failed to convert",
        Here.DELEGATED,
        "ExecuTorch adds the dimension",
        (
            case(functional.max_pool1d, x(3, 8), 2),
            case(functional.max_pool2d, x(3, 8, 6), 2, note="2d"),
            case(functional.max_pool3d, x(2, 4, 6, 4), 2, note="3d"),
            case(functional.avg_pool2d, x(3, 8, 6), 2, note="average"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2717, 2456),
        "The indices of `max_pool2d` failed to convert",
        Here.REFUSED,
        "Core ML's pooling gives maxima alone",
        (case(lambda v: functional.max_pool2d(v, 3, 1, 1, return_indices=True), x(1, 2, 5, 6)),),
        refused={"aten.max_pool2d_with_indices.default": "Core ML has only result 0"},
    ),
    Regression(
        issues(COREMLTOOLS, 2782),
        "`sort` and `argsort` with `stable` failed to convert",
        Here.REFUSED,
        "Core ML's sort does not keep the order of equal elements",
        (
            case(
                lambda v: v.sort(dim=1, stable=True), x(values=[[3.0, 1.0, 2.0], [0.0, -1.0, 0.0]])
            ),
            case(
                lambda v: v.argsort(dim=1, stable=True), x(values=[[3.0, 1.0, 1.0]]), note="argsort"
            ),
        ),
        refused={"aten.sort.stable": "Core ML's sort does not keep the order of equal elements"},
    ),
    Regression(
        issues(COREMLTOOLS, 2811),
        "`chunk` and `unbind` of a dynamic dimension failed with an error that said nothing",
        Here.NOT_CONCERNED,
        "`torch.export` makes the number of results, and so the dimension, static",
    ),
    Regression(
        issues(COREMLTOOLS, 2842),
        "A mask and an index of another dimension took the mask alone",
        Here.NOT_CONCERNED,
        "`torch.export` does not export it: the shape depends on the mask",
    ),
    Regression(
        issues(COREMLTOOLS, 2798),
        "A packed sequence given to a GRU or RNN failed to convert",
        Here.NOT_CONCERNED,
        "exported programs cannot hold one: its shape depends on values",
    ),
    Regression(
        issues(COREMLTOOLS, 2720, 2280, 2756),
        "`tf.pad` with mode `symmetric` was converted as `reflect`; `tf.nn.softplus` overflowed",
        Here.NOT_CONCERNED,
        "of the TensorFlow frontend, which ExecuTorch does not use",
    ),
    Regression(
        issues(COREMLTOOLS, 2743, 2615),
        "`convert` refuses what `torch.export` of PyTorch 2.9 and later gives",
        Here.NOT_CONCERNED,
        "coremltools is given programs in ExecuTorch's edge dialect, which it takes",
    ),
    Regression(
        issues(COREMLTOOLS, 2831),
        "Transposed and reshaped quantized weights are not stored in their final shape",
        Here.NOT_CONCERNED,
        "a matter of speed: the numbers are the same",
    ),
)
