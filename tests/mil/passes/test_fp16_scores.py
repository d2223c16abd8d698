"""Attention behind masks, padded tokens that see nothing included, against eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.checkpoints import CONFIG
from support.partitioned import delegate_functions
from support.tolerances import SQNR_FP16, SQNR_FP32, sqnr_db
from torch import nn
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.targets import Opset

LOWEST = torch.finfo(torch.float32).min
SQNR = {Precision.FLOAT16: SQNR_FP16, Precision.FLOAT32: SQNR_FP32}
TOKENS = 6

precisions = pytest.mark.parametrize("precision", SQNR)


def causal() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def allowed(tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, 1, L, S] of the keys each query may see, for tokens (1) and padding (0)."""
    return causal() & tokens.bool()[:, None, None, :]


def attend(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, -1) @ x


def scores(x: torch.Tensor) -> torch.Tensor:
    # The smallest number of fp16 has no room for them; a billion in fp32 is not changed by them.
    return x @ x.mT - 20


Attention = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ATTENTIONS: dict[str, Attention] = {
    "chosen": lambda x, t: attend(torch.where(allowed(t), 0.0, LOWEST) + scores(x), x),
    "filled": lambda x, t: attend(scores(x).masked_fill(~allowed(t), LOWEST), x),
    "multiplied": lambda x, t: attend(scores(x) + (1.0 - allowed(t).float()) * LOWEST, x),
    "filled by a billion": lambda x, t: attend(scores(x).masked_fill(~allowed(t), -1e9), x),
    "a billion times": lambda x, t: attend(scores(x) + (1.0 - allowed(t).float()) * -1e9, x),
    # What is hidden twice is infinite in fp32 as well; padded tokens then differ, and are left out.
    "added twice": lambda x, t: attend(
        scores(x)
        + torch.full((TOKENS, TOKENS), LOWEST).triu(1)
        + (1.0 - t.float())[:, None, None, :] * LOWEST,
        x,
    ).masked_fill(t[:, None, :, None] == 0, 1.0),
    "truths": lambda x, t: F.scaled_dot_product_attention(x, x, x, allowed(t)),
    "scaled": lambda x, t: F.scaled_dot_product_attention(x, x, x, allowed(t), scale=0.7),
    "infinities": lambda x, t: F.scaled_dot_product_attention(
        x, x, x, torch.where(allowed(t), 0.0, float("-inf"))
    ),
}


class Attending(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(x, tokens)


def inputs(width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, the second padded on the left: its first queries see nothing."""
    torch.manual_seed(0)
    tokens = torch.ones(2, TOKENS, dtype=torch.int32)
    tokens[1, :2] = 0
    return torch.randn(2, 3, TOKENS, width), tokens


def lowered(module: nn.Module, example: tuple[Any, ...], precision: Precision, **options: Any):
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision, **options),
        lower_full_graph=True,
    )
    exported = torch.export.export(module.eval(), example)
    return to_edge_transform_and_lower(exported, partitioner=[partitioner])


def check(module: nn.Module, example: tuple[Any, ...], precision: Precision, **options: Any):
    expected = module(*example).detach().numpy()
    pte = lowered(module, example, precision, **options).to_executorch().buffer
    for engine in ("openvino", "reference"):
        (actual,) = runtime.load_program(pte, engine=engine).run("forward", list(example))
        assert sqnr_db(expected, actual.numpy()) > SQNR[precision]


@pytest.mark.share(6)
@precisions
@pytest.mark.parametrize("name", ATTENTIONS)
def test_padded_tokens(name: str, precision: Precision) -> None:
    check(Attending(ATTENTIONS[name]), inputs(), precision)


@precisions
def test_the_op_of_core_ml(precision: Precision) -> None:
    check(
        Attending(ATTENTIONS["truths"]),
        inputs(),
        precision,
        minimum_deployment_target=Opset.iOS18,
    )


@precisions
def test_a_mask_that_is_given(precision: Precision) -> None:
    x, tokens = inputs()
    mask = torch.where(allowed(tokens), 0.0, LOWEST)
    check(Attending(lambda x, mask: attend(scores(x) + mask, x)), (x, mask), precision)


HIDING = {
    "smallest number": lambda x, t: torch.where(allowed(t), 0.0, LOWEST),
    "a billion": lambda x, t: (1.0 - allowed(t).float()) * -1e9,
    "with a bias": lambda x, t: torch.where(allowed(t), x[..., :1] * 0.1, LOWEST),
}


@precisions
@pytest.mark.parametrize("target", [Opset.iOS16, Opset.iOS18])
@pytest.mark.parametrize("size", [1.0, 12.0])
@pytest.mark.parametrize("name", HIDING)
def test_rows_hidden_by_numbers_attend_to_all_keys_alike(
    name: str, size: float, target: Opset, precision: Precision
) -> None:
    """Scores of up to a thousand, which -65504 would not absorb in fp32."""
    x, tokens = inputs()

    def attention(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x.flip(-2), x, HIDING[name](x, tokens))

    if name == "a billion":
        size = 1.0  # in fp32, a billion absorbs scores of less than 32
    example = (size * x, tokens)
    check(Attending(attention), example, precision, minimum_deployment_target=target)


@precisions
@pytest.mark.parametrize("target", [Opset.iOS16, Opset.iOS18])
def test_a_mask_that_is_an_input_hides_rows(target: Opset, precision: Precision) -> None:
    """The smallest number hides a row from the scores, minus infinity from the result."""
    x, tokens = inputs()
    mask = torch.where(allowed(tokens), 0.0, LOWEST).repeat(1, 3, 1, 1)
    mask[0, 0, 1] = -torch.inf
    attention = Attending(lambda x, mask: F.scaled_dot_product_attention(x, x, x, mask))
    check(attention, (x, mask), precision, minimum_deployment_target=target)


@pytest.mark.parametrize("number", [LOWEST, -math.inf])
def test_rows_are_compared_with_infinity_only_if_the_mask_may_have_it(number: float) -> None:
    module = Attending(
        lambda x, t: F.scaled_dot_product_attention(x, x, x, torch.where(allowed(t), 0.0, number))
    )
    options = {"minimum_deployment_target": Opset.iOS18}
    (function,) = delegate_functions(lowered(module, inputs(), Precision.FLOAT16, **options))
    types = {op.type for op in function.block.ops}
    assert ("greater" in types) == (number == -math.inf)


@pytest.mark.parametrize("hidden", [0, 2])
def test_constant_masks_of_the_op_of_core_ml(hidden: int) -> None:
    """A query is replaced only if the mask hides its whole row."""
    mask = torch.where(causal(), 0.0, LOWEST)
    mask[:hidden] = LOWEST

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x.flip(-2), x, self.mask)

    example = inputs()[:1]
    options = {"minimum_deployment_target": Opset.iOS18}
    check(Masked(), example, Precision.FLOAT16, **options)
    (function,) = delegate_functions(lowered(Masked(), example, Precision.FLOAT16, **options))
    types = [op.type for op in function.block.ops]
    assert types.count("select") == (hidden > 0)
    assert not {"clip", "reduce_max"} & set(types)


def test_constant_masks_cost_nothing() -> None:
    """Every query of a causal mask sees a key, itself, which is known before the program runs."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", causal())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, self.mask)

    (function,) = delegate_functions(lowered(Causal(), inputs()[:1], Precision.FLOAT16))
    assert not {"select", "reduce_max", "clip"} & {op.type for op in function.block.ops}


def test_scores_without_a_mask_are_left_alone() -> None:
    module = Attending(lambda x, y: attend(x @ y.mT, y))
    x, _ = inputs()
    (function,) = delegate_functions(lowered(module, (x, x), Precision.FLOAT16))
    assert "clip" not in {op.type for op in function.block.ops}


def test_what_stays_in_fp32_keeps_its_range() -> None:
    """Scores beyond fp16, all of them, in a softmax that is kept in fp32."""
    module = Attending(lambda x, bias: torch.softmax(x + bias, -1))
    x, _ = inputs()
    # Halves, of which fp32 has every one up there: nothing is lost but by the bounds of fp16.
    example = ((2 * x).round() / 2, torch.full((1,), -1e6))
    expected = module(*example).numpy()
    edge = lowered(module, example, Precision.FLOAT16, keep_fp32={"ops": ["softmax", "add"]})
    pte = edge.to_executorch().buffer
    (actual,) = runtime.load_program(pte, engine="reference").run("forward", list(example))
    assert sqnr_db(expected, actual.numpy()) > SQNR_FP16


WIDTH = 64
SCALE = WIDTH**-0.5
CONSTANT = torch.tensor(SCALE)
SCALED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "multiplied": lambda q, k: (q @ k.mT) * SCALE,
    "divided": lambda q, k: q @ k.mT / WIDTH**0.5,
    "constant first": lambda q, k: CONSTANT * (q @ k.mT),
    "batches of matrices": lambda q, k: torch.bmm(q[0], k[0].mT) * SCALE,
    "indices": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * SCALE,
    "behind a mask": lambda q, k: ((q @ k.mT) * SCALE).masked_fill(~causal()[:, :4], LOWEST),
    "plus a bias": lambda q, k: (q @ k.mT) * SCALE + torch.ones(4),
    "negative": lambda q, k: (q @ -k.mT) * -SCALE,
}


@pytest.mark.parametrize("name", SCALED)
def test_scores_that_overflow_before_they_are_scaled(name: str) -> None:
    torch.manual_seed(0)
    # Like keys for like queries: the products are up to 90,000, and 11,000 once scaled.
    q = 2 * torch.eye(TOKENS, WIDTH) + torch.randn(2, 3, TOKENS, WIDTH) / 16
    q, k = 150 * q, 150 * q[..., :4, :]
    assert 2e4 < SCALED[name](q, k).max() * SCALE**-1 > 65504 > SCALED[name](q, k).max()
    module = Attending(lambda q, k: torch.softmax(SCALED[name](q, k), -1))
    check(module, (q, k), Precision.FLOAT16)


@pytest.mark.parametrize(
    ("scores", "ops"),
    [
        (lambda x, y: (x @ y.mT) * SCALE, ["mul", "matmul"]),
        (lambda x, y: (x @ y.mT) * 2.5, ["matmul", "mul"]),
        (lambda x, y: (product := x @ y.mT) * SCALE + product, ["matmul", "mul"]),
    ],
    ids=["moved", "enlarging", "with another reader"],
)
def test_scales_below_one_move_before_the_product(scores: Attention, ops: list[str]) -> None:
    x, _ = inputs()
    module = Attending(lambda x, y: torch.softmax(scores(x, y), -1))
    (function,) = delegate_functions(lowered(module, (x, x.clone()), Precision.FLOAT16))
    assert [op.type for op in function.block.ops if op.type in ("mul", "matmul")] == ops


def test_a_softmax_in_a_branch_leaves_the_products_before_it_alone() -> None:
    x, _ = inputs()

    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT) * SCALE
        return torch.cond(q.sum() > 0, lambda s: s.softmax(-1), lambda s: s + 1, (scores,))

    check(Attending(attention), (x, x + 1), Precision.FLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_padded_batch_of_transformers(attention: str) -> None:
    """In fp16, which has not the number it hides tokens with; in one partition."""
    library = transformers()
    config = library.LlamaConfig(**CONFIG, attn_implementation=attention)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = library.LlamaModel(config)

        def forward(self, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            found = self.model(input_ids=ids, attention_mask=tokens, use_cache=False)
            return found.last_hidden_state

    _, tokens = inputs()
    check(Hidden(), (torch.randint(CONFIG["vocab_size"], (2, TOKENS)), tokens), Precision.FLOAT16)
