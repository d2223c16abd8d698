"""The kernels and the translations of a MIL op stand in modules of the same family."""

from coreml_delegate.runtime.engines.openvino import translate
from coreml_delegate.runtime.engines.openvino.registry import translations
from coreml_delegate.runtime.engines.reference import engine
from coreml_delegate.runtime.engines.reference.registry import kernels


def _families(entries) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in entries:
        family = entry.function.__module__.rpartition(".")[2]
        found.setdefault(entry.op_type, set()).add(family)
    return found


def test_both_engines_have_the_same_families() -> None:
    names = [{f.__name__.rpartition(".")[2] for f in e.FAMILIES} for e in (engine, translate)]
    assert names[0] == names[1]


def test_an_op_is_in_the_same_family_of_both_engines() -> None:
    of_kernels, of_translations = _families(kernels()), _families(translations())
    assert all(len(families) == 1 for families in of_kernels.values())
    # What OpenVINO cannot express has a kernel alone: the label of a classifier is a string.
    assert of_kernels.keys() - of_translations.keys() == {"classify"}
    assert {op: of_kernels[op] for op in of_translations} == of_translations
