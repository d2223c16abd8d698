import pickle

import pytest

from coreml_delegate import errors
from coreml_delegate.errors import CoreMLDelegateError, OptionError


def test_message_carries_all_four_parts():
    error = OptionError("unknown engine", got="'fast'", expected="auto", remedy="Pick one")
    assert str(error) == "unknown engine: got 'fast', expected auto. Pick one"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "broken"),
        ({"got": "x"}, "broken: got x"),
        ({"remedy": "Mend it"}, "broken. Mend it"),
    ],
)
def test_absent_parts_are_left_out_of_the_message(fields, message):
    assert str(CoreMLDelegateError("broken", **fields)) == message


def test_every_error_descends_from_the_base_class():
    classes = [
        v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
    ]
    assert len(classes) > 8
    assert all(issubclass(c, CoreMLDelegateError) for c in classes)


def test_errors_survive_pickling_with_their_fields():
    copy = pickle.loads(pickle.dumps(OptionError("w", got="g", expected="e", remedy="r")))
    assert type(copy) is OptionError
    assert (copy.what, copy.got, copy.expected, copy.remedy) == ("w", "g", "e", "r")
    assert str(copy) == "w: got g, expected e. r"
