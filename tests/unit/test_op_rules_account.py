"""The rules and refusals account for every op that coremltools translates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from executorch.exir.tracer import _default_decomposition_table
from torch._ops import OpOverload

from coreml_delegate.op_rules import REFUSED, RULES, rule_of
from coreml_delegate.op_rules.refused import UNTRANSLATED
from coreml_delegate.third_party import coremltools

# Quantized tensors, and the copies that tracing makes of constants.
_NEVER_EXPORTED = ("dequantize", "quantize_per_tensor", "quantize_per_channel", "lift_fresh")


def _registered() -> set[str]:
    coremltools()
    from coremltools.converters.mil.frontend.torch import torch_op_registry

    return set(torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping)


def _overloads(names: set[str]) -> Iterator[OpOverload]:
    """The functional ATen overloads on tensors that coremltools registers by name."""
    # TorchScript has more schemas than there are operators.
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, full = qualified.partition("::")
        name, _, overload = full.partition(".")
        spellings = {name.lower(), f"{name}.{overload or 'default'}".lower()}
        if namespace != "aten" or not spellings & names or name in _NEVER_EXPORTED:
            continue
        found: OpOverload = getattr(getattr(torch.ops.aten, name), overload or "default")
        returns_tensor = any("Tensor" in str(value.type) for value in found._schema.returns)
        if returns_tensor and not found._schema.is_mutable and "Dimname" not in str(found._schema):
            yield found


def test_every_op_of_coremltools_is_accounted_for() -> None:
    decomposed = set(_default_decomposition_table())
    missing = sorted(
        str(overload)
        for overload in _overloads(_registered())
        if rule_of(str(overload)) is None
        and str(overload) not in REFUSED
        and str(overload) not in UNTRANSLATED
        and overload not in decomposed
        and not overload._can_decompose()
    )
    assert missing == []


def test_refused_ops_have_no_rule_and_exist() -> None:
    assert not set(REFUSED) & set(RULES)
    for target in (*REFUSED, *UNTRANSLATED):
        _, name, overload = target.split(".")
        assert isinstance(getattr(getattr(torch.ops.aten, name), overload), OpOverload)
