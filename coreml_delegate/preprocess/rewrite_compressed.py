"""Rewrites of compressed weights, to operators that say how MIL stores them.

What coremltools makes of torchao's own is limited to matrices with 4 or 8 bits, and scales the
wrong dimension below iOS18: apple/coremltools#2589.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch.fx import Node

from coreml_delegate.errors import ConversionError
from coreml_delegate.op_rules.compressed import blocks, limits
from coreml_delegate.op_rules.constraints import casts_codes
from coreml_delegate.op_rules.rule import DEQUANTIZE_AFFINE, DEQUANTIZE_CODEBOOK, OpCall
from coreml_delegate.preprocess import own_ops
from coreml_delegate.preprocess.graph_edits import Rewrite, arguments_of, become, value_of


def _shift_scale(node: Node) -> None:
    """One scale, and perhaps one zero point, per block."""
    arguments, extent = arguments_of(node), limits(OpCall.of(node))
    data, scale, zero_point = (arguments[name] for name in ("input", "scale", "zero_point"))
    count = blocks(value_of(data).shape, list(arguments["block_size"]))
    if count is None or extent is None:
        raise ConversionError("blocks of weights that do not fit", got=str(node.format_node()))
    become(node, own_ops.shift_scale(), data, scale, zero_point, list(count), *extent)


def _look_up(node: Node) -> None:
    """The indices as they are stored: torchao widens them to look them up itself."""
    arguments = arguments_of(node)
    codes = arguments["codes"]
    source = codes.args[0] if casts_codes(codes) else codes
    become(node, own_ops.look_up(), source, arguments["codebook"])


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {DEQUANTIZE_AFFINE: _shift_scale, DEQUANTIZE_CODEBOOK: _look_up}
)
