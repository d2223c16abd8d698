"""Translations against coremltools' own registry of ops."""

from __future__ import annotations

import pytest
from support.mil import op_versions

from coreml_delegate.runtime.engines.openvino import registry, translate
from coreml_delegate.runtime.engines.openvino.registry import find, register, translations
from coreml_delegate.runtime.mil.opset import Opset

# Symbolic constants exist while coremltools converts, never in a program; the outputs of a
# classifier are no arrays.
_LEFT_TO_REFERENCE = {"_const_symbolic", "classify"}

_VERSIONS = [
    (op_type, since, operation)
    for op_type, since, operation in op_versions()
    if op_type not in _LEFT_TO_REFERENCE | set(translate.SPECIAL)
]


@pytest.mark.parametrize(
    ("op_type", "since", "operation"),
    [pytest.param(*v, id=f"{v[0]}-{v[1].name}") for v in _VERSIONS],
)
def test_signature_is_the_schema(op_type, since, operation):
    entry = find(op_type, since)
    assert entry is not None, f"{op_type} has no translation in {since.name}"
    spec = operation.input_spec.input_types
    parameters = {parameter.name: parameter for parameter in entry.parameters}
    assert set(spec) <= set(parameters)
    required = {name for name, parameter in parameters.items() if parameter.required}
    assert required <= {name for name, kind in spec.items() if not kind.optional}


def test_signatures_have_no_parameter_of_their_own():
    known: dict[str, set[str]] = {}
    for op_type, _, operation in op_versions():
        known.setdefault(op_type, set()).update(operation.input_spec.input_types)
    for entry in translations():
        assert {parameter.name for parameter in entry.parameters} <= known[entry.op_type]


def test_every_op_type_is_accounted_for():
    op_types = {op_type for op_type, _, _ in op_versions()}
    translated = {entry.op_type for entry in translations()}
    assert translated | _LEFT_TO_REFERENCE | set(translate.SPECIAL) >= op_types
    assert not translated & _LEFT_TO_REFERENCE


def test_newest_version_not_after_the_opset_wins():
    assert find("reshape", Opset.iOS16).since is Opset.iOS15
    assert find("reshape", Opset.iOS26).since is Opset.iOS17
    assert find("no_such_op", Opset.iOS26) is None


def test_two_translations_since_one_opset_are_refused():
    with pytest.raises(ValueError, match="'relu' has two translations since CoreML5"):
        register("relu", lambda: None)


def test_forms_follow_annotations():
    forms = {parameter.name: parameter.form for parameter in find("conv", Opset.iOS17).parameters}
    assert forms["bias"] is registry.Form.TENSOR
    assert forms["strides"] is registry.Form.INTS
    assert forms["groups"] is registry.Form.INT
