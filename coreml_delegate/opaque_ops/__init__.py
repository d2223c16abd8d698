"""Operators protected from decomposition: control flow, recurrent layers, compressed weights.

Each module protects calls before ExecuTorch decomposes a program, translates the protected calls to
MIL, and restores the calls that Core ML does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.opaque_ops import (
    compressed_weights,
    control_flow,
    control_flow_translation,
    recorded_compression,
    recurrent_layers,
)
from coreml_delegate.ops import Reason
from coreml_delegate.ops.call import is_placeholder_op, unwrap_edge_op
from coreml_delegate.targets import Opset


def is_protected(node: Node) -> bool:
    """Whether a node is a call of an op that replaces control flow or a recurrent layer."""
    return unwrap_edge_op(node.target) in control_flow.PROTECTED or is_placeholder_op(node.target)


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    **control_flow_translation.TRANSLATIONS,
    **recurrent_layers.TRANSLATIONS,
    **compressed_weights.TRANSLATIONS,
    **recorded_compression.TRANSLATIONS,
}
"""Translations of all opaque ops; each takes coremltools' context and the node."""


def restore_refused(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool,
) -> ExportedProgram:
    """Return ``program`` with the recurrent layers and weights restored that Core ML refuses.

    Args:
        program: In ATen dialect, before decomposition; it may be changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.

    Raises:
        OptionError: See ``compressed_weights.require_target``.
        UnsupportedOperatorError: See ``recurrent_layers.require_fixed_steps``.
    """
    program = compressed_weights.dequantize_per_use(program)
    program = compressed_weights.decompose_undelegated_dequantize(
        program, target, veto=veto, constants_inside=constants_inside
    )
    return recurrent_layers.restore_refused_layers(
        program, target, veto=veto, constants_inside=constants_inside
    )


def restore_all(program: ExportedProgram, reason: Reason) -> ExportedProgram:
    """Return ``program`` with the control flow and weights restored that no backend took.

    Args:
        program: In ATen dialect, without placeholder ops; it may be changed.
        reason: Why the calls stay out of Core ML.

    Raises:
        UnsupportedOperatorError: See ``control_flow.restore_control_flow``.
    """
    restored = compressed_weights.decompose_undelegated_dequantize(
        program, None, veto=lambda _: reason
    )
    control_flow.restore_control_flow(restored, reason)
    return restored
