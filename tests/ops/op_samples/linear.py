"""Calls of matrix products and attention."""

from __future__ import annotations

from ops.op_samples.sample import accept, b, reject, w, x

from coreml_delegate.ops import ReasonCode

S = "aten.scaled_dot_product_attention.default"
ACCEPTED = (
    accept("aten.linear.default", x(2, 4), w(3, 4), w(3)),
    accept("aten.linear.default", x(4), w(3, 4), w(3), note="rank1"),
    accept("aten.linear.default", x(2, 3, 4), w(3, 4), note="no-bias"),
    accept("aten.linear.default", x(1, 2, 3, 4), w(3, 4), w(3), note="rank4"),
    accept("aten.linear.default", x(1, 2, 2, 3, 4), w(3, 4), w(3), note="rank5"),
    accept("aten.linear.default", x(2, 4), x(3, 4), x(3), note="computed"),
    accept("aten.linear.default", x(2, 4), x(3, 4), note="computed-nobias"),
    accept("aten.linear.default", x(2, 4), w(3, 4), x(3), note="computed-bias"),
    accept("aten.linear.default", x(2, 2, 4), x(3, 4), x(3), note="computed-rank3"),
    accept("aten.matmul.default", x(2, 4), x(4, 3)),
    accept("aten.matmul.default", x(4), x(4, 3), note="vm"),
    accept("aten.matmul.default", x(2, 3, 4), x(4, 3), note="broadcast"),
    accept("aten.matmul.default", x(2, 1, 3, 4), x(5, 4, 3), note="batch"),
    accept("aten.matmul.default", x(1, 2, 2, 3, 4), x(1, 2, 2, 4, 3), note="rank5"),
    accept("aten.matmul.default", x(2, 3, 4), w(4, 3), note="constant"),
    accept("aten.mm.default", x(2, 4), x(4, 3)),
    accept("aten.mm.default", x(2, 4), w(4, 3), note="constant"),
    accept("aten.bmm.default", x(2, 3, 4), x(2, 4, 3)),
    accept("aten.addmm.default", x(3), x(2, 4), x(4, 3)),
    accept("aten.addmm.default", w(3), x(2, 4), w(4, 3), note="constant"),
    accept("aten.addmm.default", x(2, 3), x(2, 4), w(4, 3), note="matrix"),
    accept("aten.addmm.default", x(2, 1), x(2, 4), w(4, 3), note="column"),
    accept("aten.addmm.default", x(), x(2, 4), w(4, 3), note="rank0"),
    *(
        accept(
            "aten.einsum.default",
            eq,
            [x(*p), x(*q)],
            note=eq.replace(",", "_").replace("->", "_to_").replace(" ", ""),
            core=not eq.startswith("ii"),  # a diagonal
        )
        for eq, p, q in (
            ("ij,jk->ik", (2, 3), (3, 4)),
            ("bij,bjk->bik", (2, 2, 3), (2, 3, 4)),
            ("bhqd,bhkd->bhqk", (1, 2, 3, 4), (1, 2, 5, 4)),
            ("bnqk,bnkd->bqnd", (1, 2, 3, 4), (1, 2, 4, 5)),
            ("bhqk,bkhd->bqhd", (1, 2, 3, 4), (1, 4, 2, 5)),
            ("i,j->ij", (2,), (3,)),
            ("ij,ij->ij", (2, 3), (2, 3)),
            ("ij,ij->i", (2, 3), (2, 3)),
            ("ij,ij->", (2, 3), (2, 3)),
            ("ij,kj->ik", (2, 3), (4, 3)),
            ("bij,jk->bik", (2, 2, 3), (3, 4)),
            ("bchw,bkhw->bck", (1, 2, 3, 4), (1, 3, 3, 4)),
            ("abc,cd->abd", (2, 3, 4), (4, 5)),
            ("ii,ij->ij", (3, 3), (3, 4)),
            ("bc,bchw->bhw", (2, 3), (2, 3, 2, 2)),
            ("ij,jk->k", (2, 3), (3, 4)),
        )
    ),
    accept(S, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4)),
    accept(S, x(2, 3, 4), x(2, 5, 4), x(2, 5, 6), note="rank3"),
    accept(S, x(1, 1, 2, 3, 4), x(1, 1, 2, 5, 4), x(1, 1, 2, 5, 6), note="rank5"),
    accept(S, x(3, 4), x(5, 4), x(5, 4), note="rank2"),
    accept(S, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), b(3, 5), note="boolmask"),
    accept(S, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), x(1, 1, 3, 5), note="floatmask"),
    accept(S, x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), None, 0.0, True, note="causal"),
    accept(S, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), None, 0.0, True, note="causal-rect"),
    accept(S, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), scale=0.3, note="scale"),
    accept(S, x(1, 2, 3, 4), x(1, 1, 5, 4), x(1, 1, 5, 4), note="broadcast"),
)
_OP = "aten.einsum.default"
_UNCLEAR = "the equation has an ellipsis or no result"

REJECTED = (
    reject(
        ReasonCode.RANK,
        "'weight' has rank 1, Core ML takes 2 here",
        "aten.linear.default",
        x(2, 4),
        w(4),
        note="vector",
    ),
    *(
        reject(
            ReasonCode.RANK,
            "'other' is a vector",
            "aten.matmul.default",
            x(*shape),
            x(4),
            note=f"vector-rank{len(shape)}",
        )
        for shape in ((4,), (2, 4), (2, 3, 4))
    ),
    reject(
        ReasonCode.ARGUMENT,
        "alpha=2, Core ML takes 1",
        "aten.addmm.default",
        x(3),
        x(2, 4),
        x(4, 3),
        alpha=2,
        note="alpha",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "beta=2, Core ML takes 1",
        "aten.addmm.default",
        x(3),
        x(2, 4),
        x(4, 3),
        beta=2,
        note="beta",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "einsum takes two operands in Core ML",
        _OP,
        "ij->ji",
        [x(2, 3)],
        note="one",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "einsum takes two operands in Core ML",
        _OP,
        "ij,jk,kl->il",
        [x(2, 3), x(3, 2), x(2, 4)],
        note="three",
    ),
    reject(ReasonCode.ARGUMENT, _UNCLEAR, _OP, "ij,jk", [x(2, 3), x(3, 4)], note="implicit"),
    reject(
        ReasonCode.ARGUMENT,
        _UNCLEAR,
        _OP,
        "...ij,jk->...ik",
        [x(2, 2, 3), x(3, 4)],
        note="ellipsis",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "path=[0, 1], Core ML takes None",
        _OP,
        "ij,jk->ik",
        [x(2, 3), x(3, 4)],
        path=[0, 1],
        note="path",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "dropout_p=0.5, Core ML takes 0.0",
        S,
        x(1, 2, 3, 4),
        x(1, 2, 5, 4),
        x(1, 2, 5, 4),
        None,
        0.5,
        note="dropout",
        compare=False,
    ),
    reject(
        ReasonCode.ARGUMENT,
        "enable_gqa=True, Core ML takes False",
        S,
        x(1, 4, 3, 4),
        x(1, 2, 5, 4),
        x(1, 2, 5, 4),
        enable_gqa=True,
        note="gqa",
    ),
    reject(
        ReasonCode.NO_RULE,
        "no Core ML translation of aten.linalg_det.default",
        "aten.linalg_det.default",
        x(3, 3),
    ),
)
