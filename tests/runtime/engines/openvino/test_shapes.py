"""Ops of the OpenVINO engine on shapes known at run time only, against torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import mil
from support.engine_runs import assert_close, run
from support.mil import ct, mb, types

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.reader import read_program
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)


def _compile(function, *shapes):
    """``function`` of one input for each shape, in which None is any size."""
    specs = [
        mb.TensorSpec(
            [ct.RangeDim(1, 64).symbol if size is None else size for size in shape],
            dtype=types.fp32,
        )
        for shape in shapes
    ]
    names = [f"x{place}" for place in range(len(shapes))]
    # The builder names inputs after the parameters of the function it is given.
    traced = eval(
        f"lambda {', '.join(names)}: function({', '.join(names)})", {"function": function}
    )
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(traced)
    message = mil.load(program, weights_dir="", specification_version=8)
    main = mil.main(read_program(message.SerializeToString(), {}))
    compiled = OPENVINO.compile(main, EngineOptions())
    return lambda *arrays: next(iter(compiled(dict(zip(names, arrays, strict=True))).values()))


def _image(*shape):
    return _RNG.standard_normal(shape).astype(np.float32)


_MODES = {
    "UNALIGN_CORNERS": {"align_corners": False},
    "STRICT_ALIGN_CORNERS": {"align_corners": True},
    "ALIGN_CORNERS": {"align_corners": True},
}


@pytest.mark.parametrize("mode", _MODES)
def test_resize_bilinear_from_any_size(mode):
    compiled = _compile(
        lambda x: mb.resize_bilinear(
            x=x, target_size_height=7, target_size_width=5, sampling_mode=mode
        ),
        (1, 2, None, None),
    )
    for height, width in ((3, 4), (9, 5)):
        x = _image(1, 2, height, width)
        answer = F.interpolate(torch.tensor(x), (7, 5), mode="bilinear", **_MODES[mode])
        assert_close(compiled(x), answer.numpy())


def test_upsampling_by_factors_from_any_size():
    def function(x):
        return mb.concat(
            values=[
                mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=3),
                mb.upsample_bilinear(
                    x=x, scale_factor_height=2, scale_factor_width=3, align_corners=False
                ),
            ],
            axis=1,
        )

    compiled = _compile(function, (1, 2, None, None))
    for height, width in ((3, 4), (9, 5)):
        x = torch.tensor(_image(1, 2, height, width))
        answers = [
            F.interpolate(x, scale_factor=(2, 3), mode="nearest"),
            F.interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=False),
        ]
        assert_close(compiled(x.numpy()), torch.cat(answers, 1).numpy())


@pytest.mark.parametrize("mode", ["LINEAR", "NEAREST_NEIGHBOR"])
def test_resize_to_a_run_time_shape(mode):
    def function(x, shape):
        return mb.resize(
            x=x,
            shape=shape,
            resized_dims=np.uint32(2),
            interpolation_mode=mode,
            sampling_mode="UNALIGN_CORNERS",
        )

    x = _image(1, 2, 5, 4)
    main = mil.main(mil.build(function, {"x": x, "shape": np.array([3, 7], np.int32)}))
    compiled = OPENVINO.compile(main, EngineOptions())
    linear = mode == "LINEAR"
    for height, width in ((3, 7), (0, 6), (8, 2)):
        (result,) = compiled({"x": x, "shape": np.array([height, width], np.int32)}).values()
        answer = F.interpolate(
            torch.tensor(x),
            (height or 5, width),
            mode="bilinear" if linear else "nearest-exact",
            align_corners=False if linear else None,
        )
        assert_close(result, answer.numpy())


def _resize_row(mode, interpolation):
    return lambda x: mb.resize(
        x=x,
        shape=[6],
        resized_dims=np.uint32(1),
        interpolation_mode=interpolation,
        sampling_mode=mode,
    )


@pytest.mark.parametrize(
    ("mode", "positions"),
    [
        ("DEFAULT", np.arange(6) * 4 / 6 + 0.5),
        ("ALIGN_CORNERS", np.arange(6) * 3 / 5 + 0.5),
        ("OFFSET_CORNERS", (np.arange(6) + 0.5) * 3 / 6 + 0.5),
    ],
)
def test_nearest_integers(mode, positions):
    x = np.array([[0, 100, 2**24 + 1, 200]], np.int32)
    (result,) = run(OPENVINO, _resize_row(mode, "NEAREST_NEIGHBOR"), {"x": x}, Opset.iOS17)
    np.testing.assert_array_equal(result, x[:, np.floor(positions).astype(int).clip(0, 3)])


def test_linear_interpolation_of_integers_is_refused():
    x = np.array([[0, 100, 50, 200]], np.int32)
    main = mil.main(mil.build(_resize_row("DEFAULT", "LINEAR"), {"x": x}, Opset.iOS17))
    (reason,) = OPENVINO.unsupported(main)
    assert "linear interpolation of integers: got <Type: 'int32_t'>, expected fp16 or" in reason


@pytest.mark.parametrize("sampling", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["constant", "border", "reflection", "symmetric"])
@pytest.mark.parametrize("align", [True, False])
def test_resample_of_any_image(padding, align, sampling):
    compiled = _compile(
        lambda x, grid: mb.resample(
            x=x,
            coordinates=grid,
            sampling_mode=sampling,
            padding_mode=padding,
            padding_value=np.float32(0),
            coordinates_mode="normalized_minus_one_to_one",
            align_corners=align,
        ),
        (1, 2, None, None),
        (1, 3, 5, 2),
    )
    grid = _RNG.uniform(-1.6, 1.6, (1, 3, 5, 2)).astype(np.float32)
    # About which points torch reflects depends on the alignment, which MIL takes apart.
    centred = {"reflection": True, "symmetric": False}.get(padding, align)
    names = {"constant": "zeros", "symmetric": "reflection"}
    for height, width in ((4, 6), (1, 3)):
        x = _image(1, 2, height, width)
        sizes = np.array([width, height])
        pixels = (grid + 1) / 2 * (sizes - 1) if align else ((grid + 1) * sizes - 1) / 2
        again = (
            pixels * 2 / np.maximum(sizes - 1, 1) - 1 if centred else (pixels * 2 + 1) / sizes - 1
        )
        answer = F.grid_sample(
            torch.tensor(x),
            torch.tensor(again.astype(np.float32)),
            mode=sampling,
            padding_mode=names.get(padding, padding),
            align_corners=centred,
        )
        assert_close(compiled(x, grid), answer.numpy())


# Sizes at which the positions of pixels have no rounding, whatever they are counted from.
@pytest.mark.parametrize(
    ("padding", "align", "size"), [("symmetric", False, 4), ("reflection", True, 5)]
)
def test_positions_halfway_between_pixels_take_the_even_one(padding, align, size):
    x = np.arange(size, dtype=np.float32).reshape(1, 1, 1, size)
    columns = np.arange(-9.5, 12.5)
    (result,) = run(
        OPENVINO,
        lambda x, grid: mb.resample(
            x=x,
            coordinates=grid,
            sampling_mode="nearest",
            padding_mode=padding,
            padding_value=np.float32(0),
            coordinates_mode="unnormalized",
            align_corners=align,
        ),
        {
            "x": x,
            "grid": np.stack([columns, np.zeros(22)], -1).reshape(1, 1, 22, 2).astype(np.float32),
        },
    )
    low, span = (0, size - 1) if padding == "reflection" else (-0.5, size)
    turns, rest = np.divmod(np.abs(columns - low), span)
    places = low + np.where(turns % 2, span - rest, rest)
    assert_close(result.ravel(), np.round(places.clip(0, size - 1)))


def test_slice_by_size_takes_narrow_integers():
    x = _image(4, 5)
    (result,) = run(
        OPENVINO,
        lambda x, begin: mb.slice_by_size(
            x=x, begin=mb.cast(x=begin, dtype="int8"), size=np.array([2, -1], np.int8)
        ),
        {"x": x, "begin": np.array([-3, 1], np.int32)},
        Opset.iOS17,
    )
    assert_close(result, x[1:3, 1:])


def test_crops_of_any_image():
    compiled = _compile(
        lambda x, boxes: mb.crop_resize(
            x=x,
            boxes=boxes,
            box_indices=np.array([0, 1, 1], np.int32),
            target_height=4,
            target_width=3,
            normalized_coordinates=True,
            sampling_mode="ALIGN_CORNERS",
        ),
        (2, 3, None, None),
        (3, 4),
    )
    boxes = np.array([[0, 0, 1, 1], [0.2, 0.1, 0.7, 0.9], [0.5, 0, 0.5, 1]], np.float32)
    for height, width in ((9, 8), (5, 12)):
        x = _image(2, 3, height, width)
        crops = []
        for image, (top, left, bottom, right) in zip(x[[0, 1, 1]], boxes, strict=True):
            rows, columns = np.linspace(top, bottom, 4), np.linspace(left, right, 3)
            grid = np.stack(np.meshgrid(columns, rows), -1)[None] * 2 - 1
            crops.append(
                F.grid_sample(
                    torch.tensor(image[None]),
                    torch.tensor(grid.astype(np.float32)),
                    align_corners=True,
                    padding_mode="border",
                )
            )
        assert_close(compiled(x, boxes), torch.cat(crops).numpy())


@pytest.mark.parametrize("box_mode", ["CORNERS_WIDTH_FIRST", "CENTER_SIZE_WIDTH_FIRST"])
def test_regions_of_all_images(box_mode):
    x = _image(2, 3, 6, 5)
    corners = np.array([[1, 2, 3, 4], [0, 0, 4, 5]], np.float32)  # left, top, right, bottom
    roi = corners
    if box_mode.startswith("CENTER"):
        low, high = corners[:, :2], corners[:, 2:]
        roi = np.concatenate([(low + high) / 2, high - low], 1)
    (result,) = run(
        OPENVINO,
        lambda x, roi: mb.crop_resize(
            x=x,
            roi=roi,
            target_height=3,
            target_width=3,
            box_coordinate_mode=box_mode,
            sampling_mode="STRICT_ALIGN_CORNERS",
        ),
        {"x": x, "roi": roi.reshape(2, 1, 4, 1, 1)},
        Opset.iOS15,
    )
    assert result.shape == (2, 2, 3, 3, 3)
    for crops, (left, top, right, bottom) in zip(result, corners.astype(int), strict=True):
        answer = F.interpolate(
            torch.tensor(x[..., top : bottom + 1, left : right + 1]),
            (3, 3),
            mode="bilinear",
            align_corners=True,
        )
        assert_close(crops, answer.numpy())


def test_an_affine_map_for_every_image_of_a_batch():
    theta = np.array([[0.5, 0.1, 0, -0.2, 0.8, 0.1]], np.float32)
    compiled = _compile(
        lambda x: mb.affine(
            x=x,
            transform_matrix=theta,
            output_height=4,
            output_width=3,
            sampling_mode="bilinear",
            padding_mode="constant",
            padding_value=np.float32(0),
            coordinates_mode="normalized_minus_one_to_one",
            align_corners=True,
        ),
        (None, 2, 5, 6),
    )
    for batch in (1, 3):
        x = _image(batch, 2, 5, 6)
        maps = torch.tensor(theta).reshape(1, 2, 3).expand(batch, -1, -1)
        grid = F.affine_grid(maps, [batch, 2, 4, 3], align_corners=True)
        answer = F.grid_sample(torch.tensor(x), grid, align_corners=True)
        assert_close(compiled(x), answer.numpy())


@pytest.mark.parametrize(("axis", "batch_dims"), [(1, 1), (2, 1), (2, 2)])
def test_gather_in_batches_that_may_be_of_one(axis, batch_dims):
    indices = [[2, 0, 2, 1]] if batch_dims == 1 else [[[2, 0, 2, 1]] * 5]

    def function(x):
        places = mb.add(
            x=mb.const(val=np.array(indices, np.int32)),
            y=mb.mul(x=mb.gather(x=mb.shape(x=x), indices=[0], axis=0), y=np.int32(0)),
        )
        batch = mb.gather(x=mb.shape(x=x), indices=[0], axis=0)
        reps = mb.concat(values=[batch, np.ones(np.ndim(indices) - 1, np.int32)], axis=0)
        return mb.gather(
            x=x, indices=mb.tile(x=places, reps=reps), axis=axis, batch_dims=batch_dims
        )

    compiled = _compile(function, (None, 5, 4, 3))
    for batch in (1, 2):
        x = _image(batch, 5, 4, 3)
        answer = np.take(x, np.array(indices).reshape(-1, 4)[0], axis)
        assert_close(compiled(x), answer)


def test_rearrangements_of_unknown_sizes():
    def function(x, y):
        flat = mb.flatten2d(x=x, axis=2)
        mixed = mb.concat(values=[x, y], axis=1, interleave=True)
        tail = mb.slice_by_size(x=x, begin=[0, 0, -2], size=[-1, 1, 2])
        return mb.concat(
            values=[mb.reshape(x=value, shape=[-1]) for value in (flat, mixed, tail)], axis=0
        )

    compiled = _compile(function, (None, 3, None), (None, 3, None))
    for rows, columns in ((2, 4), (1, 2)):
        x, y = _image(rows, 3, columns), _image(rows, 3, columns)
        mixed = np.stack([x, y], 2)
        answer = [value.reshape(-1) for value in (x, mixed, x[:, :1, -2:])]
        assert_close(compiled(x, y), np.concatenate(answer))


@pytest.mark.parametrize("transpose_x", [False, True])
@pytest.mark.parametrize("transpose_y", [False, True])
def test_products_of_large_integers_are_exact(transpose_x, transpose_y):
    x = _RNG.integers(-20_000, 20_000, (2, 3, 7)).astype(np.int32)
    y = _RNG.integers(-20_000, 20_000, (7, 4)).astype(np.int32)
    (result,) = run(
        OPENVINO,
        lambda x, y: mb.matmul(x=x, y=y, transpose_x=transpose_x, transpose_y=transpose_y),
        {
            "x": np.swapaxes(x, 1, 2).copy() if transpose_x else x,
            "y": y.T.copy() if transpose_y else y,
        },
    )
    np.testing.assert_array_equal(result, x @ y)


_BRANCHES = {
    "two floats": (np.float32(1.5), np.float32(-2)),
    "two integers": (np.int32(3), np.int32(-4)),
    "a row and a scalar": (np.float32([1, 2, 3]), np.float32(9)),
    "a column and a row": (np.float32([[1]]), np.float32([4, 5, 6])),
}


@pytest.mark.parametrize("rows", [None, 2], ids=["dynamic", "static"])
@pytest.mark.parametrize("branches", _BRANCHES)
def test_a_condition_broadcasts_over_what_it_selects(branches, rows):
    """Coremltools declares the shape of the branches alone, and that of whatever is made of it."""
    first, second = _BRANCHES[branches]

    def function(x):
        chosen = mb.select(cond=mb.greater(x=x, y=np.float32(0)), a=first, b=second)
        return mb.mul(x=mb.abs(x=chosen), y=mb.sign(x=chosen))

    compiled = _compile(function, (rows, 3))
    for count in (2, 5) if rows is None else (rows,):
        x = _RNG.standard_normal((count, 3)).astype(np.float32)
        actual, expected = compiled(x), np.where(x > 0, first, second)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
