"""On real data a program gives the classes of the quantized PyTorch model."""

from __future__ import annotations

import pytest
from benchmarks.quantization import rows
from support.digits import all_images
from support.tolerances import flips_allowed


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "mode",
    [
        "int4-weight",
        "int4-group32",
        "codebook-4",
        "palettize-4",
        # In other tests of the default run; here the published table as a whole.
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("int8", marks=pytest.mark.slow),
    ],
)
def test_programs_classify_like_the_quantized_model(mode):
    measured = list(rows([mode]))
    assert measured
    for row in measured:
        assert row.model > 0.95, "the comparison means something"
        assert row.flips <= flips_allowed(len(all_images())), row
        assert min(row.fp32, row.fp16) > row.model - 0.01
