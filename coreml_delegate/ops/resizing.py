"""Resizing of images, and sampling them on a grid."""

from __future__ import annotations

from torch.fx import Node

from coreml_delegate.ops.call import OpCall, ReasonCode
from coreml_delegate.ops.constraints import holds, rank_between
from coreml_delegate.ops.edits import ATEN, arguments_of, become
from coreml_delegate.ops.flops import nothing, per_result
from coreml_delegate.ops.quantization import MOVE, CompositeOp
from coreml_delegate.ops.record import OpRecord


def _whole_sizes(call: OpCall) -> bool:
    """The factors give integer output sizes: coremltools converts no others."""
    tensor, factors = call.tensor("input"), call.arguments["scale_factors"]
    if tensor is None or factors is None or call.arguments.get("align_corners"):
        return True
    spatial = tensor.shape[2:]
    return all(
        ((n if isinstance(n, int) else 1) * f).is_integer()
        for n, f in zip(spatial, factors, strict=True)
    )


def _grid_sampler(node: Node) -> None:
    """Recompose ``grid_sampler``, which coremltools translates."""
    arguments = arguments_of(node)
    modes = (arguments[n] for n in ("interpolation_mode", "padding_mode", "align_corners"))
    become(node, ATEN.grid_sampler.default, arguments["input"], arguments["grid"], *modes)


_BICUBIC = 2
_INTERPOLATION = holds(
    lambda call: call.arguments["interpolation_mode"] != _BICUBIC,
    ReasonCode.ARGUMENT,
    "Core ML samples a grid bilinear or nearest, not bicubic",
)
# Four neighbours with a weight each.
_BILINEAR_FLOPS = per_result(8)
_WHOLE_SIZES = holds(
    _whole_sizes, ReasonCode.ARGUMENT, "scale_factors give a fractional output size"
)

RECORDS = (
    OpRecord("aten.upsample_nearest2d.vec", moves_data=True, flops=nothing, quantization=MOVE),
    OpRecord(
        "aten.grid_sampler.default",
        constraints=(rank_between("input", 4, 4), _INTERPOLATION),
        flops=_BILINEAR_FLOPS,
    ),
    OpRecord(
        "aten.grid_sampler_2d.default",
        constraints=(_INTERPOLATION,),
        rewrite=_grid_sampler,
        flops=_BILINEAR_FLOPS,
    ),
    OpRecord("aten.upsample_bilinear2d.vec", constraints=(_WHOLE_SIZES,), flops=_BILINEAR_FLOPS),
)

COMPOSITES = tuple(
    CompositeOp(f"aten.{name}", MOVE)
    for name in (
        *("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default"),
        *("upsample_nearest1d.vec", "upsample_nearest3d.vec"),
    )
)
