"""Batch normalization with given statistics."""

from __future__ import annotations

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.emitter import (
    Emitter,
    normalize_axis,
    operation,
    require_same_dtype,
    same_shape,
)
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.tensor_types import FLOATS
from coreml_delegate.mil.compose import mb

# Ranks of MIL's ``batch_norm``, whose features are along axis 1.
_RANKS = (3, 4, 5)


def _compose_batch_norm_inference(_: Composer, node: Node, x: Var, *statistics: Var) -> Var:
    epsilon = node.type.dtype.storage_numpy.type(node["epsilon"])
    rank, axis = node.type.rank, node["feature_index"]
    scale, offset, mean, variance = statistics
    is_constant = all(var.val is not None for var in statistics)
    if is_constant and axis == 1 and rank in _RANKS:
        return mb.batch_norm(
            x=x, mean=mean, variance=variance, gamma=scale, beta=offset, epsilon=epsilon
        )
    deviation = mb.sqrt(x=mb.add(x=variance, y=epsilon))
    factor = mb.real_div(x=scale, y=deviation)
    shift = mb.sub(x=offset, y=mb.mul(x=mean, y=factor))
    sizes = [1] * rank
    sizes[axis] = -1
    factor, shift = (mb.reshape(x=var, shape=sizes) for var in (factor, shift))
    return mb.add(x=mb.mul(x=x, y=factor), y=shift)


class Normalization(Emitter):
    """Batch normalization with given statistics."""

    @operation(FLOATS, _compose_batch_norm_inference)
    def batch_norm_inference(
        self,
        x: Value,
        scale: Value,
        offset: Value,
        mean: Value,
        variance: Value,
        epsilon: float = 1e-5,
        feature_index: int = 1,
    ) -> Value:
        """Return ``(x - mean) / sqrt(variance + epsilon) * scale + offset``.

        Args:
            x: Tensor of rank 1 or more.
            scale: An element for each feature.
            offset: An element for each feature.
            mean: An element for each feature.
            variance: An element for each feature.
            epsilon: Added to the variance.
            feature_index: Axis of the features.
        """
        operands = (x, scale, offset, mean, variance)
        require_same_dtype("batch_norm_inference", *operands)
        axis = normalize_axis(feature_index, x.rank, "feature axis")
        for operand in operands[1:]:
            if not same_shape(operand.shape, (x.shape[axis],)):
                raise GraphError(
                    "batch_norm_inference: wrong shape of a statistic",
                    got=str(operand.type),
                    expected=f"[{x.shape[axis]}], one element per feature",
                )
        return self.emit(
            "batch_norm_inference", operands, x.type, epsilon=epsilon, feature_index=axis
        )
