"""Calls on small matrices, and distances."""

from __future__ import annotations

import functools
import math

from ops.op_samples.sample import Sample, TensorArg, accept, reject, x

from coreml_delegate.ops import ReasonCode

_DET = "aten._linalg_det.default"
_INV = "aten.linalg_inv_ex.default"
_SOLVE = "aten._linalg_solve_ex.default"
_DISTANCE = "aten._cdist_forward.default"
_PAIRS = "aten._pdist_forward.default"

# By the number of rows; each needs other rows as pivots, and none is near to being singular.
_MATRICES = {
    1: [[-4.0]],
    2: [[0.0, 2.0], [-1.5, 0.5]],
    3: [[0.0, 2.0, 1.0], [1.0, -1.0, 0.5], [3.0, 0.25, 0.0]],
    4: [[0.0, 2, 1, 0.5], [1, -1, 0.5, 0], [3, 0.25, 0, 1], [0.5, 1, -2, 0.25]],
}
_PAIR = x(values=[_MATRICES[3], [[2.0, 0.5, 0.0], [0.0, 1.0, -1.0], [0.5, 0.0, 1.5]]])
# A camera: the product of its focal lengths is beyond fp16. And its inverse.
_CAMERA = x(values=[[1000.0, 0.0, 500.0], [0.0, 1100.0, 400.0], [0.0, 0.0, 1.0]])
_BACK = x(values=[[0.001, 0.0, -0.5], [0.0, 0.001, -0.25], [0.0, 0.0, 1.0]])

_accept = functools.partial(accept, takes=(0,))


def _matrix(rows: int) -> TensorArg:
    return x(values=_MATRICES[rows])


def _each(target: str) -> list[Sample]:
    return [_accept(target, _matrix(n), note=f"{n} rows") for n in _MATRICES]


ACCEPTED = (
    *_each(_DET),
    _accept(_DET, _PAIR, note="batch"),
    _accept(_DET, x(values=[[0.0, 0.0], [300.0, 400.0]]), note="zero"),
    _accept(_DET, x(values=[[300.0, 0.0], [0.0, 0.01]]), note="far"),
    *_each(_INV),
    _accept(_INV, _PAIR, note="batch"),
    _accept(_INV, _CAMERA, note="camera"),
    _accept(_INV, _BACK, note="back"),
    *(_accept(_SOLVE, _matrix(n), x(n), note=f"{n} rows") for n in _MATRICES),
    _accept(_SOLVE, _PAIR, x(2, 3, 4), note="matrices"),
    _accept(_SOLVE, _PAIR, x(2, 4, 3), left=False, note="right"),
    _accept(_SOLVE, _PAIR, x(2, 3), note="vectors"),
    _accept(_SOLVE, _matrix(3), x(2, 3, 4), note="broadcast"),
    *(
        accept(_DISTANCE, x(2, 5, 3), x(2, 7, 3), p, None, note=f"p={p:g}")
        for p in (0.0, 1.0, 2.0, 3.0, math.inf)
    ),
    accept(_DISTANCE, x(5, 3), x(2, 1, 7, 3), 2.0, None, note="broadcast"),
    accept(_DISTANCE, x(5, 3, low=-900.0, high=900.0), x(7, 3), 2.0, None, note="far"),
    *(accept(_PAIRS, x(5, 3), p, note=f"p={p:g}") for p in (0.0, 1.0, 2.0, 3.0, math.inf)),
    accept(_PAIRS, x(2, 3), note="one pair"),
)

REJECTED = (
    reject(ReasonCode.SHAPE, "pairs of at most 512 rows", _PAIRS, x(513, 2), note="513 rows"),
    *(
        reject(
            ReasonCode.SHAPE,
            "Core ML takes matrices of at most 4 rows",
            target,
            x(5, 5),
            *more,
            takes=(0,),
            note="5 rows",
        )
        for target, more in ((_DET, ()), (_INV, ()), (_SOLVE, (x(5),)))
    ),
    *(
        reject(
            ReasonCode.USE,
            "result 1 is used",
            target,
            _PAIR,
            *more,
            takes=(0, 1),
            note="more results",
        )
        for target, more in ((_DET, ()), (_INV, ()), (_SOLVE, (x(2, 3),)))
    ),
)
