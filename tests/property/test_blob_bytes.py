"""Blobs and compile options: round trips, and only our error on damage."""

from __future__ import annotations

from contextlib import suppress

import pytest
from executorch.exir.backend.compile_spec_schema import CompileSpec
from hypothesis import given, settings
from hypothesis import strategies as st

from coreml_delegate.dynamic_shapes.enumerated import (
    EnumeratedInput,
    EnumeratedShapes,
    SymbolicSize,
)
from coreml_delegate.errors import BlobFormatError, OptionError
from coreml_delegate.formats.blob import BlobReference, flatten, unflatten
from coreml_delegate.options.compile_specs import ModelType, Precision, WeightSharing
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.options.weight_compression import KINDS, LINEAR, PALETTE, stages_of
from coreml_delegate.targets import ComputeUnit, Opset

pytestmark = pytest.mark.property

NAMES = st.text(
    st.characters(exclude_characters='/"\\', exclude_categories=("Cc", "Cs")), min_size=1
).filter(lambda name: name not in (".", ".."))
# Depth 1 and 2 with disjoint names, so that no file is also a folder.
FILES = st.dictionaries(
    st.one_of(
        NAMES.map(lambda n: f"f{n}"), st.tuples(NAMES, NAMES).map(lambda p: f"d{p[0]}/{p[1]}")
    ),
    st.binary(max_size=200),
    max_size=8,
)


def _enumerated(sizes):
    """An input ``x`` of shape [s0, 3], each of the sizes for ``s0``."""
    sizes_of_x = (SymbolicSize("s0", 1, 9), 3)
    return EnumeratedShapes(
        (EnumeratedInput(("x",), sizes_of_x, tuple((size, 3) for size in sizes)),)
    )


OPTIONS = st.builds(
    CompileOptions,
    compute_unit=st.sampled_from(ComputeUnit),
    deployment_target=st.none() | st.sampled_from(Opset),
    precision=st.sampled_from(Precision),
    model_type=st.sampled_from(ModelType),
    op_linear_quantizer_config=st.none()
    | st.dictionaries(
        st.sampled_from(KINDS[LINEAR].keys), st.none() | st.integers() | st.text(), max_size=3
    ),
    weight_compression=st.none()
    | st.dictionaries(st.sampled_from(KINDS[PALETTE].keys), st.none() | st.integers()).map(
        lambda config: stages_of({"config_type": PALETTE, "global_config": config})
    ),
    enumerated_shapes=st.none()
    | st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True).map(_enumerated),
    pass_names=st.none() | st.lists(st.text(), max_size=3).map(tuple),
    weight_sharing=st.none() | st.sampled_from(WeightSharing),
)


@given(FILES)
def test_blob_round_trip(files):
    assert {name: bytes(data) for name, data in unflatten(flatten(files)).items()} == files


@given(FILES, st.data())
def test_truncated_blobs_raise_only_our_error(files, data):
    whole = flatten(files)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with suppress(BlobFormatError):
        unflatten(whole[:cut])


@settings(max_examples=300)
@given(FILES, st.data())
def test_flipped_bits_raise_only_our_error(files, data):
    whole = bytearray(flatten(files))
    for _ in range(data.draw(st.integers(1, 4))):
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        whole[bit // 8] ^= 1 << bit % 8
    with suppress(BlobFormatError):
        unflatten(bytes(whole))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_our_error(data):
    for read in (unflatten, BlobReference.decode, lambda d: BlobReference.decode(b"CMJR" + d)):
        with suppress(BlobFormatError):
            read(data)


@given(OPTIONS)
def test_options_round_trip(options):
    assert CompileOptions.from_specs(options.to_specs()) == options


@given(st.text(max_size=20), st.binary(max_size=20))
def test_arbitrary_specs_raise_only_our_error(key, value):
    with suppress(OptionError):
        CompileOptions.from_specs([CompileSpec(key, value)])
