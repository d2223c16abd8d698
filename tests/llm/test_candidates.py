"""Tokens that a model selects itself: the same as those selected from its logits outside."""

from __future__ import annotations

import functools

import pytest
import torch
from support.checkpoints import CONFIG, tiny_model
from support.lowering import Function, fp32_specs, lower_unchecked
from support.quantization import few_bits
from support.tolerances import SQNR_FP16, logits_bounds, sqnr_db

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.llm.candidates import Candidates, Selection
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.sampling import Sampler, Sampling
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.targets import Opset

pytestmark = pytest.mark.xdist_group("candidates")

ARGMAX, TOP_5 = Selection(), Selection(5)
CACHES = (CacheKind.IO, CacheKind.STATE)  # of the layout that these programs have
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
GREEDY = Sampler(Sampling())
STEPS = 12
LARGE = 70_000  # tokens beyond 16 bits


@functools.cache
def lowered(
    selection: Selection | None, cache: CacheKind, precision: Precision, linear: str
) -> bytes:
    model = tiny_model("llama", num_hidden_layers=1)
    decoder = Decoder(model, context=48)
    quantize_weights(decoder, **few_bits(linear))
    layout = Layout(CONFIG["vocab_size"], 48, 4, cache, selection=selection)
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_methods(decoder, layout), layout, partitioner).buffer
    assert [len(report.partitions) for report in partitioner.reports] == [1] * len(layout.methods)
    assert not any(report.undelegated for report in partitioner.reports)
    return program


def loaded(selection: Selection | None, *options: object, engine: str = "openvino") -> Generator:
    defaults = (CacheKind.IO, Precision.FLOAT32, "none")
    return Generator.load(lowered(selection, *options, *defaults[len(options) :]), engine=engine)


@functools.cache
@torch.no_grad()
def expected() -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, and the logits behind the prompt and each token."""
    model, tokens = tiny_model("llama", num_hidden_layers=1), list(PROMPT)
    for _ in range(STEPS):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return tokens[len(PROMPT) :], logits[len(PROMPT) - 1 :]


@pytest.mark.parametrize("selection", [ARGMAX, TOP_5, Selection(1)])
def test_texts_are_read_as_they_were_written(selection):
    assert Selection.parse(str(selection)) == selection


@pytest.mark.parametrize(
    "text", ["", "argmaxx", "top-k", "top-k:", "top-k:0", "top-k:-1", "top-k:²"]
)
def test_other_texts_are_refused(text):
    message = r"cannot select .* expected argmax or top-k:K, where K is at least 1"
    with pytest.raises(OptionError, match=message):
        Selection.parse(text)


def test_more_tokens_than_there_are_cannot_be_selected():
    Selection(97).check(97)
    ARGMAX.check(1)
    with pytest.raises(OptionError, match=r"got top-k:98, expected at most top-k:97"):
        Selection(98).check(97)


def test_layouts_with_a_selection_have_version_3():
    plain = Layout(300, 128, 16, CacheKind.IO)
    assert plain.constants()["get_llm_layout_version"] == 2
    assert "get_selection" not in plain.constants()
    for selection in (ARGMAX, TOP_5):
        constants = Layout(300, 128, 16, CacheKind.IO, selection=selection).constants()
        assert constants["get_llm_layout_version"] == 3
        read = Layout.read(tuple(constants), lambda name, c=constants: _values(c[name]))
        assert read.selection == selection


def _values(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT16])
@pytest.mark.parametrize("selection", [ARGMAX, Selection(40)])
def test_the_lowest_of_equal_logits_is_first(selection, precision):
    """Numbers of 6 bits, so that thousands are equal, and tokens beyond 16 bits."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(-32, 32, (3, 1, LARGE), generator=random) / 4.0
    rows[2, 0, LARGE - 3 :] = 9.0
    program = lower_unchecked(
        Function(selection.select),
        (rows[0],),
        compile_specs=fp32_specs(
            compute_precision=precision, minimum_deployment_target=Opset.iOS18
        ),
    )
    assert program.operators == ()
    for engine in ("openvino", "reference"):
        loaded = runtime.load_program(program.pte, engine=engine)
        for row in rows:
            results = [torch.as_tensor(result) for result in loaded.run("forward", [row])]
            assert results[-1].dtype == torch.int32
            best = row[0].sort(descending=True, stable=True)
            count = selection.top_k or 1
            assert results[-1].flatten().tolist() == best.indices[:count].tolist()
            if selection.top_k:
                assert results[0][0].tolist() == best.values[:count].tolist()


def test_candidates_are_in_the_order_of_their_logits_then_tokens():
    logits = torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0]])
    tokens = torch.tensor([[4, 9, 2, 7, 0]], dtype=torch.int32)
    read = Candidates.read([logits, tokens])
    assert read.tokens.tolist() == [4, 2, 7, 9, 0]
    assert read.logits is not None
    assert read.logits.tolist() == [5.0, 3.0, 3.0, 3.0, 1.0]
    assert Candidates.of_logits(torch.tensor([1.0, 3.0, 3.0])).tokens.tolist() == [1, 2, 0]


@pytest.mark.parametrize("count", [1, 2, 500, 999, 1000, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_top_k_candidates_are_the_first_of_a_full_sort(count, dtype):
    """Numbers of 6 bits, so that many are equal; infinite ones and NaN as ``sort`` has them."""
    logits = torch.randint(-32, 32, (1000,), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[10], logits[700:], logits[20] = torch.inf, -torch.inf, torch.nan
    best = Candidates.of_logits(logits, count)
    assert best.logits is not None
    order = logits.sort(descending=True, stable=True)
    assert best.tokens.tolist() == order.indices[:count].tolist()
    torch.testing.assert_close(best.logits, order.values[:count], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("selection", "cache", "engine"),
    [
        (TOP_5, CacheKind.IO, "openvino"),
        *(
            pytest.param(selection, cache, engine, marks=pytest.mark.slow)
            for selection in (ARGMAX, TOP_5)
            for cache in CACHES
            for engine in ("openvino", "reference")
            if (selection, cache, engine) != (TOP_5, CacheKind.IO, "openvino")
        ),
    ],
)
def test_tokens_equal_those_of_transformers(selection, cache, engine):
    tokens, logits = expected()
    generator = loaded(selection, cache, engine=engine)
    assert list(generator.generate(PROMPT, GREEDY, limit=STEPS)) == tokens
    generator.reset()
    offers = [generator.propose(PROMPT), *(generator.propose([token]) for token in tokens)]
    if selection.top_k is None:
        assert all(offer.logits is None for offer in offers)
        assert [offer.tokens.tolist() for offer in offers[:-1]] == [[token] for token in tokens]
        return
    best = logits.topk(selection.top_k)
    offered = torch.stack([offer.tokens for offer in offers])
    found = torch.stack([offer.logits for offer in offers if offer.logits is not None])
    theirs = logits.gather(1, offered)
    if cache is CacheKind.STATE:  # which is fp16, so close logits may change places
        assert sqnr_db(theirs.numpy(), found.numpy()) > SQNR_FP16
        assert sqnr_db(best.values.numpy(), theirs.numpy()) > SQNR_FP16
        return
    assert torch.equal(offered, best.indices)
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(found, theirs, atol=atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("linear", ["none", "int8", "int4"])
@pytest.mark.parametrize("cache", CACHES)
def test_fp16_and_integer_weights_select_what_their_logits_say(cache, linear):
    options = (cache, Precision.FLOAT16, linear)
    plain, argmax, top = (loaded(each, *options) for each in (None, ARGMAX, TOP_5))
    tokens = PROMPT
    for _ in range(STEPS):
        logits = plain.feed(tokens)
        best = Candidates.of_logits(logits)
        offer = top.propose(tokens)
        assert offer.logits is not None
        assert best.logits is not None
        assert torch.equal(offer.tokens, best.tokens[:5])
        assert torch.equal(offer.logits, best.logits[:5])
        tokens = argmax.propose(tokens).tokens.tolist()
        assert tokens == [int(logits.argmax())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (Sampling(0.8, seed=3), Sampling(0.8, top_k=5, seed=3)),
        (Sampling(2.0, top_k=5, seed=4), Sampling(2.0, top_k=5, seed=4)),
        (Sampling(2.0, top_k=3, top_p=0.9, seed=5), Sampling(2.0, top_k=3, top_p=0.9, seed=5)),
        (Sampling(0.0, top_k=3), Sampling(0.0)),
    ],
)
def test_draws_are_those_from_the_logits(inside, outside):
    """Without top_k all the candidates take part."""
    made = [
        list(loaded(selection).generate(PROMPT, Sampler(sampling), limit=30))
        for selection, sampling in ((TOP_5, inside), (None, outside))
    ]
    assert made[0] == made[1]
    assert len(made[0]) == 30


@pytest.mark.parametrize(
    ("sampling", "selection", "message"),
    [
        (Sampling(0.5), ARGMAX, r"nothing to sample: got temperature 0.5\. Export it with"),
        (Sampling(top_k=3), ARGMAX, "got top_k 3"),
        (Sampling(top_p=0.5), ARGMAX, "got top_p 0.5"),
        (Sampling(0.5, top_k=6), TOP_5, "returns 5 tokens .* got top_k 6, expected at most 5"),
        (Sampling(), ARGMAX, None),
        (Sampling(0.5, top_p=0.5), TOP_5, None),
        (Sampling(0.5, top_k=5), TOP_5, None),
        (Sampling(0.5, top_k=6, top_p=0.5), None, None),
    ],
)
def test_settings_need_enough_tokens(sampling, selection, message):
    if message is None:
        sampling.check(selection)
        return
    with pytest.raises(OptionError, match=message):
        sampling.check(selection)


def test_programs_that_select_return_no_logits():
    """Nothing is computed when a call cannot be answered."""
    generator = loaded(TOP_5)
    with pytest.raises(ProgramError, match=r"no logits .* got .*--sample-in-model top-k:5\. Call"):
        generator.feed(PROMPT)
    with pytest.raises(OptionError, match=r"only a Sampler chooses among .* got function"):
        next(generator.generate(PROMPT, lambda logits: int(logits.argmax())))
    with pytest.raises(OptionError, match="got top_k 6"):
        next(generator.generate(PROMPT, Sampler(Sampling(1.0, top_k=6))))
    assert generator.position == 0


@pytest.mark.slow
def test_plain_programs_propose_all_tokens():
    offer = loaded(None).propose(PROMPT)
    logits = loaded(None).feed(PROMPT)
    assert torch.equal(offer.tokens, logits.sort(descending=True, stable=True).indices)
    assert sorted(offer.tokens.tolist()) == list(range(CONFIG["vocab_size"]))


@pytest.mark.slow
@pytest.mark.parametrize("selection", [ARGMAX, TOP_5])
def test_equal_models_give_equal_bytes(selection):
    options = (selection, CacheKind.IO, Precision.FLOAT32, "none")
    assert lowered.__wrapped__(*options) == lowered(*options)
