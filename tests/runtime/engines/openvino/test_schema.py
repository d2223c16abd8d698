"""Signatures of translations against the ops that coremltools registers."""

from __future__ import annotations

import pytest
from support.mil import op_versions

from coreml_delegate.runtime.engines.openvino.structural_ops import STRUCTURAL
from coreml_delegate.runtime.engines.openvino.translations import TRANSLATIONS
from coreml_delegate.runtime.engines.openvino.values import Form
from coreml_delegate.targets import Opset

# Symbolic constants exist while coremltools converts, never in a program; the outputs of a
# classifier are no arrays.
_LEFT_TO_REFERENCE = {"_const_symbolic", "classify"}

_VERSIONS = [
    (op_type, since, operation)
    for op_type, since, operation in op_versions()
    if op_type not in _LEFT_TO_REFERENCE | set(STRUCTURAL)
]


@pytest.mark.parametrize(
    ("op_type", "since", "operation"),
    [pytest.param(*v, id=f"{v[0]}-{v[1].name}") for v in _VERSIONS],
)
def test_signature_is_the_schema(op_type, since, operation):
    entry = TRANSLATIONS.find(op_type, since)
    assert entry is not None, f"{op_type} has no translation in {since.name}"
    spec = operation.input_spec.input_types
    parameters = entry.schema.parameters
    assert set(spec) <= set(parameters)
    required = {name for name, parameter in parameters.items() if parameter.required}
    assert required <= {name for name, kind in spec.items() if not kind.optional}


def test_signatures_have_no_parameter_of_their_own():
    known: dict[str, set[str]] = {}
    for op_type, _, operation in op_versions():
        known.setdefault(op_type, set()).update(operation.input_spec.input_types)
    for entry in TRANSLATIONS:
        assert entry.schema.parameters.keys() <= known[entry.op_type]


def test_every_op_type_is_accounted_for():
    op_types = {op_type for op_type, _, _ in op_versions()}
    translated = {entry.op_type for entry in TRANSLATIONS}
    assert translated | _LEFT_TO_REFERENCE | set(STRUCTURAL) >= op_types
    assert not translated & _LEFT_TO_REFERENCE


def test_the_newest_version_that_the_opset_has_is_found():
    assert TRANSLATIONS.find("reshape", Opset.iOS16).since is Opset.iOS15
    assert TRANSLATIONS.find("reshape", Opset.iOS26).since is Opset.iOS17
    assert TRANSLATIONS.find("no_such_op", Opset.iOS26) is None


def test_a_second_translation_since_the_same_opset_is_refused():
    with pytest.raises(ValueError, match="'relu' has two translations since iOS15"):
        TRANSLATIONS.add(TRANSLATIONS.get("relu", Opset.iOS15))


def test_forms_follow_annotations():
    parameters = TRANSLATIONS.find("conv", Opset.iOS17).schema.parameters
    assert parameters["bias"].form is Form.TENSOR
    assert parameters["strides"].form is Form.INTS
    assert parameters["groups"].form is Form.INT
