import pytest

from coreml_delegate.errors import OptionError
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset


def test_table_agrees_with_coremltools():
    targets = {name: t.value for name, t in coremltools().target.__members__.items()}
    with_programs = {n: v for n, v in targets.items() if v >= Opset.iOS15}
    assert {n: int(Opset.from_target_name(n)) for n in with_programs} == with_programs


@pytest.mark.parametrize("opset", list(Opset))
def test_mil_names_round_trip(opset):
    assert Opset.from_mil_name(opset.mil_name) is opset


def test_mil_name_of_a_known_opset():
    assert Opset.iOS17.mil_name == "CoreML7"


@pytest.mark.parametrize("name", ["iOS14", "iOS99", "", "CoreML7"])
def test_unknown_targets_are_refused(name):
    with pytest.raises(OptionError, match="unknown deployment target"):
        Opset.from_target_name(name)


def test_unknown_mil_opset_is_refused():
    with pytest.raises(OptionError, match="unknown MIL opset: got 'CoreML3'"):
        Opset.from_mil_name("CoreML3")
