"""Signatures of kernels against the ops that coremltools registers."""

from __future__ import annotations

import pytest
from support.mil import op_versions

from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.engines.reference.compiler import STRUCTURAL
from coreml_delegate.runtime.engines.reference.kernels import KERNELS
from coreml_delegate.targets import Opset

# Symbolic constants exist while coremltools converts, never in a program.
_NEVER_SERIALIZED = {"_const_symbolic"}

VERSIONS = [
    pytest.param(op_type, since, operation, id=f"{op_type}-{since.name}")
    for op_type, since, operation in op_versions()
    if op_type not in STRUCTURAL | _NEVER_SERIALIZED
]


@pytest.mark.parametrize(("op_type", "since", "operation"), VERSIONS)
def test_signature_is_the_schema(op_type, since, operation):
    found = KERNELS.find(op_type, since)
    assert found is not None, f"{op_type} has no kernel in {since.name}"
    expected = operation.input_spec.input_types
    assert set(expected) <= set(found.schema.parameters)
    optional = {name for name, spec in expected.items() if spec.optional}
    required_here = {name for name, p in found.schema.parameters.items() if p.required}
    assert required_here <= expected.keys() - optional


def test_signatures_have_no_parameter_of_their_own():
    known: dict[str, set[str]] = {}
    for op_type, _, operation in op_versions():
        known.setdefault(op_type, set()).update(operation.input_spec.input_types)
    for kernel in KERNELS:
        assert kernel.schema.parameters.keys() <= known[kernel.op_type]


def test_kernels_do_not_precede_the_version_they_implement():
    introduced = {(op_type, since) for op_type, since, _ in op_versions()}
    assert [
        (k.op_type, k.since.name) for k in KERNELS if (k.op_type, k.since) not in introduced
    ] == []


def test_every_op_has_a_kernel_or_is_structural():
    op_types = {op_type for op_type, _, _ in op_versions()} - _NEVER_SERIALIZED
    assert {op for op in op_types if KERNELS.find(op, Opset.iOS26) is None} <= STRUCTURAL
    assert len(op_types) == 167  # a change of coremltools shall be noticed


def test_the_newest_version_that_the_opset_has_is_found():
    assert "validate_indices" not in KERNELS.find("gather", Opset.iOS16).schema.parameters
    assert "validate_indices" in KERNELS.find("gather", Opset.iOS26).schema.parameters
    assert KERNELS.find("scaled_dot_product_attention", Opset.iOS17) is None
    assert KERNELS.find("no_such_op", Opset.iOS26) is None


def test_a_second_kernel_since_the_same_opset_is_refused():
    with pytest.raises(ValueError, match="'relu' has two kernels since iOS15"):
        KERNELS.add(KERNELS.get("relu", Opset.iOS15))


def test_engine_is_always_available():
    assert REFERENCE.name == "reference"
    assert REFERENCE.unavailable_reason() is None
