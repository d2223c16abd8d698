"""Calls of ops that draw random numbers; what they draw is tested in ``test_random_numbers``."""

import torch
from ops.op_samples.sample import accept, reject, x

from coreml_delegate.op_rules import ReasonCode

ACCEPTED = (
    accept("aten.randn.default", [3, 4], compare=False),
    # Core ATen has neither, and nothing they decompose to.
    accept("aten.randn_like.default", x(3, 4), compare=False, core=False),
    accept("aten.rand_like.default", x(3, 4), compare=False, core=False),
)

REJECTED = (
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the result has dynamic shape",
            f"aten.{op}.default",
            x(3, 4),
            dynamic=True,
            compare=False,
            note="dynamic",
        )
        for op in ("randn_like", "rand_like")
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is float64",
        "aten.rand_like.default",
        x(3, 4),
        dtype=torch.float64,
        compare=False,
        note="float64",
    ),
)
