"""Each op has one record, in the module of its family, and none is forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from executorch.exir.tracer import _default_decomposition_table
from ops.op_samples import ACCEPTED
from torch._ops import OpOverload

from coreml_delegate.ops import FAMILIES, RECORDS, REFUSED, record_of
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.scripts.inputs.vision import import_torchvision

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
        if record_of(str(overload)) is None
        and str(overload) not in REFUSED
        and overload not in decomposed
        and not overload._can_decompose()
    )
    assert missing == []


def test_refused_ops_have_no_rule_and_exist() -> None:
    assert not set(REFUSED) & set(RECORDS)
    import_torchvision()
    for target in REFUSED:
        namespace, name, overload = target.split(".")
        if namespace not in ("aten", "torchvision"):  # see partition/test_custom_ops.py
            continue
        packet = getattr(getattr(torch.ops, namespace), name)
        assert isinstance(getattr(packet, overload), OpOverload)


def test_samples_stand_in_the_module_of_the_same_family() -> None:
    families = {f.__name__.rpartition(".")[2]: f for f in FAMILIES}
    for name, samples in ACCEPTED.items():
        sampled = {s.target for s in samples}
        assert sampled == {r.target for r in families.pop(name).RECORDS if r.standalone}
    # A program cannot consist of one of the others; they have tests of their own.
    assert {
        r.target for family in families.values() for r in family.RECORDS if r.standalone
    } == set()


_NAMED_ELSEWHERE = {
    # Some have no result, and vanish before the program runs; others have no kernel that computes
    # fp16 in fp32.
    "partition/verdicts/cpu_kernels.py": {
        "aten._cdist_forward.default",
        "aten._fft_c2r.default",
        "aten._fft_r2c.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._pdist_forward.default",
        "aten._upsample_bilinear2d_aa.default",
        "aten.addmm.default",
        "aten.avg_pool2d.default",
        "aten.convolution.default",
        "aten.cumsum.default",
        "aten.grid_sampler_2d.default",
        "aten.native_layer_norm.default",
        "aten.scatter_add.default",
        "aten.var.correction",
        "aten.var.dim",
        "aten.var_mean.correction",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
    },
    "coreml_delegate/transforms/half_precision.py": {
        "aten.view.dtype"
    },  # it has no record: nothing can be widened there
    # Constants behind these are known; only one of them has a record.
    "coreml_delegate/transforms/constant_folding.py": {
        "aten._assert_tensor_metadata.default",
        "aten.detach_.default",
        "aten.lift_fresh_copy.default",
    },
    "quantizer/patterns.py": {"aten.batch_norm.default"},  # frozen during training
}


def test_ops_are_named_in_their_records_alone() -> None:
    """Whoever changes a record would have to find and change every other mention of the op."""
    root = Path(__file__).parents[2]
    named: dict[str, set[str]] = {}
    core = ("exported", "lowering", "mil", "opaque_ops", "transforms")
    rooms = [f"coreml_delegate/{room}" for room in core]
    for room in (*rooms, "partition", "quantizer", "runtime", "scripts"):
        for path in (root / room).rglob("*.py"):
            found = set(re.findall(r'"(aten\.\w+\.\w+)"', path.read_text()))
            if found:
                named[str(path.relative_to(root))] = found
    assert named == _NAMED_ELSEWHERE
