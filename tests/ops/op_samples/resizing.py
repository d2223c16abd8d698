"""Calls of ops that resize images, or sample them on a grid."""

from ops.op_samples.sample import accept, reject, x

from coreml_delegate.ops import ReasonCode

_NEAREST = "aten.upsample_nearest2d.vec"
_BILINEAR = "aten.upsample_bilinear2d.vec"
_IMAGE = (1, 2, 3, 4)
_LARGE_IMAGE = (1, 2, 6, 8)

ACCEPTED = (
    *(
        accept(_NEAREST, x(*shape), *args, note=note)
        for shape, args, note in (
            (_IMAGE, ([6, 8], None), "size"),
            (_IMAGE, ([3, 4], None), "samesize"),
            (_IMAGE, ([5, 7], None), "oddsize"),
            (_IMAGE, (None, [2.0, 2.0]), "scale"),
            (_IMAGE, (None, [1.5, 2.5]), "oddscale"),
            (_LARGE_IMAGE, (None, [0.5, 0.5]), "down"),
        )
    ),
    *(
        accept(_BILINEAR, x(*shape), *args, note=note)
        for shape, args, note in (
            (_IMAGE, ([6, 8], False, None), "size"),
            (_IMAGE, ([6, 8], True, None), "size-align"),
            (_IMAGE, ([3, 4], False, None), "samesize"),
            (_IMAGE, ([3, 4], True, None), "samesize-align"),
            (_IMAGE, ([5, 7], False, None), "oddsize"),
            (_IMAGE, ([5, 7], True, None), "oddsize-align"),
            (_IMAGE, (None, False, [2.0, 2.0]), "scale"),
            (_IMAGE, (None, True, [2.0, 2.0]), "scale-align"),
            (_LARGE_IMAGE, (None, False, [0.5, 0.5]), "down"),
            (_LARGE_IMAGE, ([3, 4], False, None), "downsize"),
        )
    ),
    *(
        accept(
            f"aten.{op}.default",
            x(2, 3, 5, 6),
            x(2, 4, 7, 2, low=-4.0, high=4.0),
            mode,
            padding,
            align,
            note=f"{mode}-{padding}-{align}",
            fp16=False,  # whose places are some thousandths of a pixel apart
        )
        for op in ("grid_sampler", "grid_sampler_2d")
        for mode in range(2)
        for padding in range(3)
        for align in (False, True)
    ),
    *(
        accept(
            "aten.grid_sampler.default",
            x(1, 2, *size),
            x(1, 3, 3, 2, low=-3.0, high=3.0),
            0,
            2,
            align,
            note=f"reflected-{size}-{align}",
            fp16=False,
        )
        for size in ((1, 4), (4, 1))
        for align in (False, True)
    ),
)

REJECTED = (
    reject(
        ReasonCode.ARGUMENT,
        "scale_factors give a fractional output size",
        _BILINEAR,
        x(*_IMAGE),
        None,
        False,
        [1.5, 2.5],
        note="broken",
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            "Core ML samples a grid bilinear or nearest, not bicubic",
            f"aten.{op}.default",
            x(*_IMAGE),
            x(1, 2, 2, 2),
            2,
            0,
            True,
            note="bicubic",
        )
        for op in ("grid_sampler", "grid_sampler_2d")
    ),
    reject(
        ReasonCode.RANK,
        "'input' has rank 5, Core ML takes 4 here",
        "aten.grid_sampler.default",
        x(1, 2, 3, 4, 5),
        x(1, 2, 2, 2, 3),
        0,
        0,
        True,
        note="volume",
    ),
)
