"""Whatever the bytes of a MIL program are, it runs or is refused with an error of ours."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import damage

from coreml_delegate.errors import BlobFormatError, CoreMLDelegateError
from coreml_delegate.runtime.engines import limits

pytestmark = pytest.mark.property

CORPUS = damage.CORPUS
SAMPLES = sorted(path.name for path in CORPUS.iterdir())
SEEDS = [name for name in SAMPLES if not name.startswith("found-")]

BRIEF = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(limits, "MAX_TURNS", damage.MAX_TURNS)


def choose(data: st.DataObject):
    return lambda count: data.draw(st.integers(0, count - 1))


@pytest.mark.parametrize("engine", ["reference", "openvino", damage.NATIVE])
@pytest.mark.parametrize("name", SAMPLES)
def test_corpus(name, engine):
    errors = damage.execute((CORPUS / name).read_bytes(), engine)
    assert all(str(error).strip() for error in errors)


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_run(name):
    """Damage to a program that does not run to begin with would test little."""
    assert damage.execute((CORPUS / name).read_bytes(), "reference") == []


@pytest.mark.parametrize("name", SEEDS)
@BRIEF
@given(data=st.data())
def test_damaged_fields(name, data):
    sample = (CORPUS / name).read_bytes()
    times = data.draw(st.integers(1, 3))
    damage.execute(damage.damage(sample, choose(data), times=times), "reference")


@pytest.mark.parametrize("name", SEEDS[:3])
@BRIEF
@given(data=st.data())
def test_truncated(name, data):
    spec, weights = damage.unpack((CORPUS / name).read_bytes())
    cut = spec[: data.draw(st.integers(0, len(spec) - 1))]
    # A message may end after any whole field: then something the program needs is missing.
    with pytest.raises(CoreMLDelegateError):
        damage.read(damage.pack(cut, weights))


@pytest.mark.parametrize("name", SEEDS[:3])
@BRIEF
@given(data=st.data())
def test_bits_flipped(name, data):
    spec, weights = damage.unpack((CORPUS / name).read_bytes())
    damaged = bytearray(spec)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(spec) - 1), min_size=1, max_size=8)):
        damaged[bit // 8] ^= 1 << bit % 8
    with suppress(CoreMLDelegateError):
        damage.read(damage.pack(bytes(damaged), weights))


@BRIEF
@given(st.binary(max_size=300))
def test_any_weight_file(weights):
    spec, whole = damage.unpack((CORPUS / "stored").read_bytes())
    if weights != whole:
        with pytest.raises(BlobFormatError):
            damage.read(damage.pack(spec, weights))
