"""Convolutions."""

from coreml_delegate.op_rules.constraints import holds, is_constant
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode


def _batched(call: OpCall) -> bool:
    tensor, weight = call.tensor("input"), call.tensor("weight")
    return tensor is None or weight is None or tensor.dim() == weight.dim()


def _output_padding_within_padding(call: OpCall) -> bool:
    """Coremltools takes the output padding off the padding at the end."""
    arguments = call.arguments
    extra, padding = arguments["output_padding"], arguments["padding"]
    if not arguments.get("transposed", True):
        return True
    dims = max(len(extra), len(padding))
    pairs = zip(_spread(padding, dims), _spread(extra, dims), strict=True)
    return all(p >= e for p, e in pairs)


def _spread(values: list[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)


_CONSTANTS = (is_constant("weight"), is_constant("bias"))
_BATCHED = holds(_batched, ReasonCode.RANK, "the input has no batch dimension")
_OUTPUT_PADDING = holds(
    _output_padding_within_padding, ReasonCode.ARGUMENT, "output_padding is larger than padding"
)
_PLAIN = (
    "aten.conv1d.default",
    "aten.conv1d.padding",
    "aten.conv2d.default",
    "aten.conv2d.padding",
    "aten.conv3d.default",
)
_TRANSPOSED = (
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)

RULES = (
    *(OpRule(target, "convolution", constraints=(*_CONSTANTS, _BATCHED)) for target in _PLAIN),
    *(
        OpRule(target, "convolution", constraints=(*_CONSTANTS, _BATCHED, _OUTPUT_PADDING))
        for target in _TRANSPOSED
    ),
    OpRule("aten.convolution.default", "convolution", constraints=(*_CONSTANTS, _OUTPUT_PADDING)),
)
