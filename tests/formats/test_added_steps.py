"""The metadata entry of steps that an export adds around a model."""

from __future__ import annotations

import pytest

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.added_steps import METADATA_KEY, AddedSteps


@pytest.mark.parametrize(
    "steps",
    [
        AddedSteps({"x": ((0.5,), (1.0, 2.0, 3.0))}, ("scores",), ("a", "scores")),
        AddedSteps(softmax=("scores",)),
    ],
)
def test_steps_are_read_as_written(steps: AddedSteps) -> None:
    metadata: dict[str, str] = {}
    steps.write(metadata)
    assert AddedSteps.read(metadata) == steps


def test_no_steps_have_no_entry() -> None:
    metadata = {METADATA_KEY: "{}"}
    AddedSteps().write(metadata)
    assert metadata == {}
    assert AddedSteps.read(metadata) == AddedSteps()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"images": 1}', '{"images": {"x": [1]}}', '{"images": {"x": [["a"], []]}}']
)
def test_damaged_entries_are_refused(text: str) -> None:
    with pytest.raises(BlobFormatError, match=METADATA_KEY):
        AddedSteps.read({METADATA_KEY: text})
