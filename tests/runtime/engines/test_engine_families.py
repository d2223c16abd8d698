"""The kernel and the translation of a MIL op stand in modules of the same name."""

import sys
from collections import defaultdict

import pytest

from coreml_delegate.runtime.engines.openvino.translations import TRANSLATIONS
from coreml_delegate.runtime.engines.reference.kernels import KERNELS


def _families_by_op(table) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for version in table:
        family = version.function.__module__.rpartition(".")[2]
        found.setdefault(version.op_type, set()).add(family)
    return found


def test_both_engines_have_the_same_families() -> None:
    assert KERNELS.families == TRANSLATIONS.families


def test_an_op_is_in_one_family_and_in_the_same_of_both_engines() -> None:
    of_kernels, of_translations = _families_by_op(KERNELS), _families_by_op(TRANSLATIONS)
    assert all(len(families) == 1 for families in of_kernels.values())
    # OpenVINO cannot express the label of a classifier, a string: it has a kernel only.
    assert of_kernels.keys() - of_translations.keys() == {"classify"}
    assert {op: of_kernels[op] for op in of_translations} == of_translations


@pytest.mark.parametrize("table", [KERNELS, TRANSLATIONS], ids=["kernels", "translations"])
def test_a_function_of_an_op_with_several_versions_is_named_for_its_opset(table) -> None:
    versions = defaultdict(list)
    for version in table:
        # A function made for a whole family of ops has no name of its own.
        if hasattr(sys.modules[version.function.__module__], version.function.__name__):
            versions[version.op_type].append(version)
    for op, of_op in versions.items():
        if len({version.function for version in of_op}) > 1:
            names = [version.function.__name__ for version in of_op]
            assert names == [f"{op}_{version.since.name.lower()}" for version in of_op]
