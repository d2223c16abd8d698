"""Arrays as tensors of the reference engine, and back."""

from __future__ import annotations

import numpy as np
import pytest

from coreml_delegate.runtime.engines.reference.values import array_to_tensor, value_to_array
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import TensorType

INTEGERS = [
    dtype
    for dtype in DType
    if dtype.name.startswith(("INT", "UINT")) and dtype.name.endswith(("8", "16", "32", "64"))
]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
def test_the_ends_of_an_integer_dtype_keep_their_values(dtype: DType) -> None:
    limits = np.iinfo(dtype.numpy)
    last = min(int(limits.max), np.iinfo(np.int64).max)  # uint64 has int64 as its carrier
    array = np.array([limits.min, 0, 1, last], dtype.numpy)
    tensor = array_to_tensor(array, dtype)
    assert tensor.tolist() == array.tolist()
    back = value_to_array(tensor, TensorType(dtype, (4,)))
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()
