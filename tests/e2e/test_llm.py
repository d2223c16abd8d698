"""A trained language model from torch to text: equal tokens and a perplexity close to torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.command import tiny_pte
from support.docstrings import CONTEXT, END, held_out_rows, perplexity, texts, trained, untrained
from support.gates import needs_compiler, needs_vnni
from support.lowering import fp32_specs
from support.quantization import few_bits
from support.tolerances import (
    ATOL_RTOL_LOGITS,
    PERPLEXITY_FP16,
    PERPLEXITY_INT4,
    SQNR_FP16,
    SQNR_FP32,
    sqnr_db,
)

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.llm.calibrated_weights import calibrate_weights
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Ending, Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.sampling import Sampler, Sampling
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.targets import Opset

# On one worker, so that the model is trained and lowered once.
pytestmark = [pytest.mark.xdist_group("docstrings"), pytest.mark.slow]
CHUNK = 16
LAYOUT = Layout(256, CONTEXT, CHUNK, CacheKind.IO, eos=(END,))
PROMPT = list(b"Return a new ")
GREEDY = Sampler(Sampling())
ENGINES = ["openvino", "reference"]


def lowered(precision: Precision, layout: Layout = LAYOUT, *, linear: str = "none") -> bytes:
    """The trained model as a ``.pte``; with integer weights if ``linear`` says so."""
    decoder = untrained()
    decoder.load_state_dict(trained().state_dict())
    decoder.requires_grad_(False)
    if linear != "none":
        quantize_weights(decoder, **few_bits(linear, "int8", group=32))
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    return lower(export_methods(decoder, layout), layout, partitioner).buffer


@pytest.fixture(scope="module")
def fp32():
    return lowered(Precision.FLOAT32)


@pytest.fixture(scope="module")
def fp16():
    return lowered(Precision.FLOAT16)


@pytest.fixture(scope="module")
def stateful():
    return lowered(Precision.FLOAT32, replace(LAYOUT, chunk=4, cache=CacheKind.STATE))


@pytest.fixture(scope="module")
def int4():
    return lowered(Precision.FLOAT16, linear="int4")


@torch.no_grad()
def eager_tokens(count: int) -> list[int]:
    """Greedy tokens of torch, computed on whole texts without a cache."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(trained()(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@torch.no_grad()
def stepwise_perplexity(generator: Generator, rows: torch.Tensor) -> float:
    """Perplexity of a generator that is fed one token at a time."""
    logits = []
    for row in rows.tolist():
        generator.reset()
        logits.append(torch.stack([generator.feed([token]) for token in row[:-1]]))
    return perplexity(torch.stack(logits), rows)


def test_the_model_is_trained():
    rows = held_out_rows(16)
    learnt = perplexity(trained()(rows[:, :-1]), rows)
    frequencies = torch.bincount(torch.tensor(list(texts()[0])), minlength=256) + 1.0
    by_frequency = torch.log(frequencies).expand(*rows[:, 1:].shape, 256)
    assert learnt < perplexity(by_frequency, rows) / 1.5


@pytest.mark.parametrize(
    ("engine", "host"),
    [
        ("openvino", "python"),
        ("reference", "python"),
        pytest.param("openvino", "stock", marks=needs_compiler),
    ],
)
def test_greedy_tokens_equal_those_of_torch(fp32, engine, host):
    generator = Generator.load(fp32, engine=engine, host=host)
    assert list(generator.generate(PROMPT, GREEDY, limit=64)) == eager_tokens(64)
    assert generator.ending is Ending.LIMIT
    assert generator.position == len(PROMPT) + 63
    assert (generator.prefill.tokens, generator.decode.tokens) == (len(PROMPT), 63)


@pytest.mark.parametrize("engine", ENGINES)
def test_perplexity_in_fp16_is_close_to_torch(fp16, engine):
    rows = held_out_rows(8, 64)
    eager = perplexity(trained()(rows[:, :-1]), rows)
    generator = Generator.load(fp16, engine=engine)
    assert stepwise_perplexity(generator, rows) == pytest.approx(eager, rel=PERPLEXITY_FP16)


def test_gptq_loses_less_than_rounding_with_equal_groups():
    rows, text = held_out_rows(64), list(texts()[0][: 100 * CONTEXT])

    def changed_by(change: Callable[[Decoder], None]) -> float:
        decoder = untrained()
        decoder.load_state_dict(trained().state_dict())
        change(decoder)
        with torch.no_grad():
            return perplexity(decoder(rows[:, :-1]), rows)

    group = 96
    rounded = changed_by(lambda d: quantize_weights(d, **few_bits("int4", "none", group=group)))
    calibrated = changed_by(lambda d: calibrate_weights(d, "gptq-4", text, group=group))
    assert calibrated < rounded


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, CONTEXT])
def test_chunks_of_any_length_give_the_logits_of_the_whole_text(fp32, length):
    (row,) = held_out_rows(1)
    generator = Generator.load(fp32)
    generator.feed([1, 2, 3])
    generator.reset()  # what was seen before leaves no trace
    atol, rtol = ATOL_RTOL_LOGITS
    logits = generator.feed(row[:length].tolist())
    torch.testing.assert_close(logits, trained()(row[None, :length])[0, -1], atol=atol, rtol=rtol)


@pytest.mark.parametrize("engine", ENGINES)
def test_perplexity_with_4_bit_weights_is_close_to_torch(int4, engine):
    rows = held_out_rows(8, 64)
    eager = perplexity(trained()(rows[:, :-1]), rows)
    generator = Generator.load(int4, engine=engine)
    assert stepwise_perplexity(generator, rows) == pytest.approx(eager, rel=PERPLEXITY_INT4)


@needs_vnni
@pytest.mark.parametrize("host", ["python", pytest.param("stock", marks=needs_compiler)])
def test_dynamic_quantization_keeps_the_perplexity(int4, host):
    rows = held_out_rows(8, 64)
    eager = perplexity(trained()(rows[:, :-1]), rows)
    options = EngineOptions(dynamic_quantization=True)
    generator = Generator.load(int4, engine="openvino", host=host, options=options)
    assert stepwise_perplexity(generator, rows) == pytest.approx(eager, rel=PERPLEXITY_INT4)
    generator.reset()
    exact = Generator.load(int4, engine="openvino", host=host)
    assert sqnr_db(exact.feed(PROMPT), generator.feed(PROMPT)) < SQNR_FP32


def test_4_bit_weights_are_stored_in_4_bits(int4, fp16):
    """A scale for each 32 weights, and all functions' operations, come on top."""
    # A quarter of the weights, beside operations and their debug info.
    assert len(int4) < 0.65 * len(fp16)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [1, 3, 4, 9, CONTEXT])
def test_caches_in_a_state_give_the_same_tokens(stateful, engine, length):
    """States are fp16, whatever the model computes in."""
    (row,) = held_out_rows(1)
    generator = Generator.load(stateful, engine=engine)
    generator.feed([1, 2, 3])
    generator.reset()
    for place in range(0, length, 6):
        logits = generator.feed(row[place : min(place + 6, length)].tolist())
    expected = trained()(row[None, :length])[0, -1]
    assert sqnr_db(expected.numpy(), logits.numpy()) > SQNR_FP16
    assert generator.room == CONTEXT - length


def test_each_generator_has_its_own_state(stateful):
    one, other = (Generator.load(stateful) for _ in range(2))
    one.feed(PROMPT)
    other.feed([1] * len(PROMPT))
    assert not torch.allclose(one.feed([10]), other.feed([10]), atol=0.1)


def test_weights_are_stored_once(fp32, fp16):
    parameters = sum(parameter.numel() for parameter in trained().parameters())
    for pte, size in ((fp32, 4), (fp16, 2)):
        assert len(PteProgram.open(pte).named_data_keys) == 1
        tables = 2 * CONTEXT * 24 * size  # cosines and sines for heads of 24
        constants = parameters * size + tables
        assert (
            constants < len(pte) < constants + 360_000
        )  # two functions of a hundred operations, with debug info


def test_a_program_declares_its_layout(fp32):
    assert Generator.load(fp32).layout == LAYOUT


def test_a_program_without_a_language_model_is_refused():
    with pytest.raises(ProgramError, match="is not a language model for ExecuTorch's runners"):
        Generator.load(tiny_pte())


def test_the_context_is_a_limit(fp32):
    generator = Generator.load(fp32)
    with pytest.raises(InputError, match=r"context of 128 tokens is too short: got 129 more"):
        generator.feed([1] * 129)
    with pytest.raises(InputError, match=r"a prompt of 13 and 117 more, expected at most 128 more"):
        next(generator.generate(PROMPT, GREEDY, limit=117))
    generator.feed([1] * 100)
    with pytest.raises(InputError, match=r"100 tokens in it, 29 more, expected at most 28 more"):
        generator.feed([1] * 29)
    tokens = list(generator.generate([1] * 20, lambda _: 1))
    assert (len(tokens), generator.ending, generator.room) == (9, Ending.CONTEXT, 0)
    with pytest.raises(InputError, match="expected at most 0 more"):
        generator.feed([1])
    generator.reset()
    assert len(list(generator.generate(PROMPT, lambda _: 1, limit=116))) == 116


def test_tokens_that_end_a_text(fp32):
    generator = Generator.load(fp32)
    first, second = eager_tokens(2)
    assert list(generator.generate(PROMPT, GREEDY, stops=[second])) == [first]
    assert generator.ending is Ending.STOP
    generator.reset()
    assert list(generator.generate(PROMPT, lambda _: END)) == []
    assert generator.ending is Ending.STOP


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "there is no token"),
        ([256], "not in the model's vocabulary: got 256, expected 0 to 255"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(fp32, tokens, message):
    with pytest.raises(InputError, match=message):
        Generator.load(fp32).feed(tokens)
