"""Whatever the bytes of a ``.pte`` are, reading them works or raises an error of ours."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.delegated import two_methods
from support.programs import export_case

from coreml_delegate.errors import BlobFormatError, CoreMLDelegateError
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.pte import PteProgram

pytestmark = pytest.mark.property

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


class Delegate:
    input_count = 1
    native = None

    def __call__(self, inputs):
        raise AssertionError("nothing is run here")


def load_everything(data: bytes) -> None:
    """Read a program and prepare all of it, short of running it."""
    try:
        program = PteProgram.open(data)
    except BlobFormatError:
        return
    host = PythonProgram(program, lambda payload: Delegate(), backend_id="EagerTestBackend")
    for name in program.method_names:
        try:
            host.load_method(name)
        except CoreMLDelegateError:
            continue


def sample(name: str) -> bytes:
    return two_methods() if name == "two_methods" else export_case(name)[1]


SAMPLES = ("two_methods", "branches", "counter", "several_outputs")


# Programs with data behind the tables: without it, the last bytes of the file may be padding.
@pytest.mark.parametrize("name", ["two_methods", "branches", "counter"])
@QUICK
@given(data=st.data())
def test_truncated(name: str, data: st.DataObject) -> None:
    whole = sample(name)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BlobFormatError):
        PteProgram.open(whole[:length])


@pytest.mark.parametrize("name", SAMPLES)
@QUICK
@given(data=st.data())
def test_bits_flipped(name: str, data: st.DataObject) -> None:
    damaged = bytearray(sample(name))
    # The tables come first, and flips in weights are no errors.
    bits = data.draw(st.lists(st.integers(0, 8 * min(len(damaged), 4096) - 1), min_size=1))
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    load_everything(bytes(damaged))


@pytest.mark.parametrize("name", SAMPLES)
@QUICK
@given(data=st.data())
def test_words_replaced(name: str, data: st.DataObject) -> None:
    damaged = bytearray(sample(name))
    position = 4 * data.draw(st.integers(0, min(len(damaged), 4096) // 4 - 1))
    word = data.draw(st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0]))
    damaged[position : position + 4] = word.to_bytes(4, "little")
    load_everything(bytes(damaged))


@QUICK
@given(data=st.binary(max_size=400))
def test_any_bytes_behind_the_identifier(data: bytes) -> None:
    load_everything(data[:4].ljust(4, b"\0") + b"ET12" + data[4:])
