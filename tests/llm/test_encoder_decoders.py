"""Encoder-decoder models: the logits and tokens of transformers' own modules, or one error."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm import family_table
from support.encoder_decoder_families import (
    CONTEXT,
    FAMILIES,
    REFUSED,
    SOURCE,
    tiny_model,
    tiny_source,
)
from support.multimethod import IOS18
from support.multimethod import specs as specs_of
from support.quantization import few_bits
from support.tolerances import SQNR_FP16, SQNR_FP32, SQNR_INT8, logits_bounds, sqnr_db

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import CoreMLDelegateError, InputError, OptionError
from coreml_delegate.formats.blob import BlobReference, unflatten
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.encoder_decoder_methods import export_encoder_decoder
from coreml_delegate.llm.export import lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.source import Source, SourceKind, Spectrogram
from coreml_delegate.ops import ReasonCode
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.runtime.program.pte import PteProgram

CHUNK, STEPS = 8, 64
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]  # two chunks

pytestmark = pytest.mark.xdist_group("encoder_decoders")

names = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if family.quick else pytest.mark.slow)
        for name, family in FAMILIES.items()
    ],
)


def model(name: str) -> Any:
    return tiny_model(FAMILIES[name].model_type, FAMILIES[name].config)


def prepared(name: str, *, module: Any = None) -> EncoderDecoder:
    source = None if FAMILIES[name].audio else FAMILIES[name].samples or SOURCE
    module = model(name) if module is None else module
    return EncoderDecoder(module, context=CONTEXT, source=source)


@torch.no_grad()
def logits_of_transformers(module: Any, source: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits behind each token of an answer, computed at once and without a cache."""
    given = {module.main_input_name: source, "decoder_input_ids": torch.tensor([tokens])}
    return module(**given, use_cache=False).logits[0]


@functools.cache
def expected(name: str) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers behind the prompt, and the logits behind each."""
    module, source, tokens = model(name), tiny_source(name), list(PROMPT)
    for _ in range(STEPS):
        tokens.append(int(logits_of_transformers(module, source, tokens)[-1].argmax()))
    logits = logits_of_transformers(module, source, tokens)
    return tokens[len(PROMPT) :], logits[len(PROMPT) - 1 :]


def lowered(made: EncoderDecoder, precision: Precision = Precision.FLOAT32) -> bytes:
    source = Source(made.kind, made.source, (3,))
    layout = Layout(made.vocabulary, CONTEXT, CHUNK, CacheKind.IO, source=source)
    specs = specs_of("POSITIONAL", compute_precision=precision, **IOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_encoder_decoder(made, layout), layout, partitioner).buffer
    assert layout.methods == ("encode", "decode", "prefill")
    assert [len(report.partitions) for report in partitioner.reports] == [1, 1, 1]
    assert not any(report.undelegated for report in partitioner.reports)
    return program


@functools.cache
def program(name: str) -> bytes:
    return lowered(prepared(name))


def given(name: str) -> Sequence[int] | torch.Tensor:
    source, family = tiny_source(name), FAMILIES[name]
    return source if family.audio else source[0] if family.samples else source[0].tolist()


def logits_of(generator: Generator, name: str, tokens: list[int]) -> torch.Tensor:
    """Logits behind the prompt, and behind each token after it."""
    generator.encode(given(name))
    return torch.stack([generator.feed(PROMPT), *(generator.feed([token]) for token in tokens)])


@names
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    tokens, logits = expected(name)
    actual = logits_of(Generator.load(program(name), engine="openvino"), name, tokens)
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual, logits, atol=atol, rtol=rtol)
    assert actual[:-1].argmax(-1).tolist() == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper", "t5"])
@pytest.mark.parametrize(
    ("engine", "host"),
    [("reference", "python"), ("openvino", "stock"), ("reference", "stock")],
)
def test_engines_and_hosts_agree(name, engine, host):
    tokens, logits = expected(name)
    generator = Generator.load(program(name), engine=engine, host=host)
    actual = logits_of(generator, name, tokens[:8])
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual, logits[:9], atol=atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["whisper", "moonshine", "t5", "t5, gated", "umt5", "bart", "m2m_100"]
)
def test_fp16_stays_close(name):
    """On the engine that computes in fp16, and on the one that has fp16 weights alone."""
    tokens, logits = expected(name)
    program = lowered(prepared(name), Precision.FLOAT16)
    for engine in ("reference", "openvino"):
        actual = logits_of(Generator.load(program, engine=engine), name, tokens)
        assert sqnr_db(logits.numpy(), actual.numpy()) > SQNR_FP16


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("t5", "wo"), ("t5, gated", "wi_1")])
@torch.no_grad()
def test_t5_does_not_overflow_in_fp16(name, factor):
    """What its layers add is above the largest fp16 number, as in trained models.

    The other engine computes in fp32.
    """
    module, source = model(name), tiny_source(name)
    sums: list[float] = []
    hooks: list[Any] = []
    for path, part in module.named_modules():
        if path.endswith(factor):
            part.weight.mul_(4e4)
        if type(part).__name__ == "T5LayerFF":
            hooks.append(
                part.register_forward_hook(lambda *args: sums.append(float(args[2].abs().max())))
            )
    logits = logits_of_transformers(module, source, PROMPT)
    for hook in hooks:
        hook.remove()
    assert max(sums) > torch.finfo(torch.float16).max
    made = prepared(name, module=module)
    generator = Generator.load(lowered(made, Precision.FLOAT16), engine="reference")
    generator.encode(given(name))
    assert sqnr_db(logits[-1].numpy(), generator.feed(PROMPT).numpy()) > SQNR_FP16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper", "t5"])
@pytest.mark.parametrize("linear", ["int8", "int4"])
def test_quantized_weights_are_those_of_torchao(name, linear):
    made = prepared(name)
    quantize_weights(made, **few_bits(linear, "int8"))
    generator = Generator.load(lowered(made))
    generator.encode(given(name))
    actual = generator.feed(PROMPT[:CHUNK])
    caches = [rows for layer in made.layers for rows in layer.empty(CONTEXT, 0).values()]
    source, *length = made.example()
    with torch.no_grad():
        if length:
            known = tiny_source(name)
            source = torch.cat((known, source[:, : made.source - known.shape[1]]), dim=1)
            length = [torch.tensor([known.shape[1]])]
        else:
            source = tiny_source(name)
        cross = made.encode(source, *length)
        tokens, last = torch.tensor([PROMPT[:CHUNK]]), torch.tensor([CHUNK - 1])
        logits = made.advance(tokens, torch.tensor([0]), caches, cross, *length or [None], last)[0]
    assert sqnr_db(logits[0].numpy(), actual.numpy()) > SQNR_FP32
    whole = logits_of_transformers(model(name), tiny_source(name), PROMPT[:CHUNK])[-1]
    if linear == "int8":
        assert sqnr_db(whole.numpy(), actual.numpy()) > SQNR_INT8


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.slow)])
def test_weights_are_stored_once_in_one_model(name):
    made, opened = prepared(name), PteProgram.open(program(name))
    (key,) = opened.named_data_keys
    files = unflatten(opened.named_data(key))
    (weights,) = [len(data) for path, data in files.items() if path.endswith("weight.bin")]
    parameters = sum(parameter.numel() for parameter in made.parameters()) * 4
    assert parameters < weights < 1.3 * parameters  # with tables and masks
    for method in ("encode", "decode", "prefill"):
        info = opened.method(method)
        (delegate,) = info.delegates
        assert BlobReference.decode(delegate.processed).function_name == method
        # Nor are weights that a method does not use stored with it.
        assert not [v for v in info.values if isinstance(v, TensorSpec) and v.is_constant]


@functools.cache
def recognizer(cache: CacheKind) -> bytes:
    """Whisper in the layout of ExecuTorch's runner of speech recognition."""
    made = prepared("whisper")
    source = Source(made.kind, made.source, (3,))
    layout = Layout(made.vocabulary, CONTEXT, 1, cache, eos=(2,), source=source, standard=True)
    has_states = cache is CacheKind.STATE
    target = IOS18 if has_states else {}
    specs = CoreMLBackend.generate_compile_specs(compute_precision="float32", **target)
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=has_states)
    program = lower(export_encoder_decoder(made, layout), layout, partitioner).buffer
    assert layout.methods == ("encoder", "text_decoder")
    assert [len(report.partitions) for report in partitioner.reports] == [1, 1]
    encoder, decoder = partitioner.reports
    assert not encoder.undelegated
    assert {node.reason.code for node in decoder.undelegated if node.reason} == {ReasonCode.SKIPPED}
    return bytes(program)


@pytest.mark.parametrize(
    ("cache", "engine", "host"),
    [
        (CacheKind.STATE, "openvino", "stock"),
        pytest.param(CacheKind.STATE, "reference", "python", marks=pytest.mark.slow),
        (CacheKind.BUFFER, "openvino", "stock"),
        pytest.param(CacheKind.BUFFER, "reference", "python", marks=pytest.mark.slow),
    ],
)
def test_a_recognizer_is_called_as_by_executorchs_runner(cache, engine, host):
    """The calls of ``AsrRunner::transcribe``, which ExecuTorch's wheel does not have."""
    runner = runtime.load_program(recognizer(cache), engine=engine, host=host)
    module, features = model("whisper"), tiny_source("whisper")
    for recording in (features, features.flip(-1)):  # the caches need no reset in between
        (encoded,) = runner.run("encoder", [recording])
        assert torch.as_tensor(encoded).dim() >= 3  # the runner logs three sizes
        tokens = [3]
        for position in range(STEPS // 2):
            (logits,) = runner.run(
                "text_decoder", [torch.tensor([tokens[-1:]]), encoded, torch.tensor([position])]
            )
            tokens.append(int(torch.as_tensor(logits).flatten().argmax()))
        expected_logits = logits_of_transformers(module, recording, tokens[:-1])
        assert tokens[1:] == expected_logits.argmax(-1).tolist()
        actual = torch.as_tensor(logits)[0]
        atol, rtol = logits_bounds(expected_logits)
        torch.testing.assert_close(actual, expected_logits[-1], atol=atol, rtol=rtol)
    with pytest.raises(CoreMLDelegateError):
        runner.run("text_decoder", [torch.tensor([[3]]), encoded, torch.tensor([CONTEXT])])


def test_a_recognizer_generates_as_the_other_layout():
    tokens, logits = expected("whisper")
    generator = Generator.load(recognizer(CacheKind.BUFFER), engine="openvino")
    actual = logits_of(generator, "whisper", tokens[:8])
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual, logits[:9], atol=atol, rtol=rtol)


def test_a_model_of_texts_is_not_for_executorchs_runner():
    source = Source(SourceKind.TOKENS, SOURCE, (3,))
    with pytest.raises(OptionError, match="takes spectrograms of recordings"):
        Layout(256, CONTEXT, 1, CacheKind.BUFFER, source=source, standard=True)


def test_another_source_gives_other_logits():
    generator = Generator.load(program("t5"))
    found: list[torch.Tensor] = []
    for source in ([5, 6, 7], [5, 6, 8], [5, 6, 7]):
        generator.encode(source)
        assert generator.position == 0
        found.append(generator.feed(PROMPT))
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])
    logits = logits_of_transformers(model("t5"), torch.tensor([[5, 6, 7]]), PROMPT)[-1]
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(found[0], logits, atol=atol, rtol=rtol)


def test_suppressed_tokens_are_those_of_transformers():
    """Tokens that would be chosen first and later are suppressed."""
    free, _ = expected("t5")
    suppressed, first = (free[5], free[9]), (free[0],)
    module = model("t5")
    module.generation_config.eos_token_id = None
    theirs = module.generate(
        tiny_source("t5"),
        decoder_input_ids=torch.tensor([PROMPT]),
        max_new_tokens=24,
        do_sample=False,
        suppress_tokens=list(suppressed),
        begin_suppress_tokens=list(first),
    )
    generator = Generator.load(program("t5"))
    source = generator.layout.source
    assert source is not None
    generator.layout = replace(
        generator.layout, source=replace(source, suppressed=suppressed, first_suppressed=first)
    )
    generator.encode(given("t5"))
    made = list(generator.generate(PROMPT, lambda logits: int(logits.argmax()), limit=24))
    assert made == theirs[0, len(PROMPT) :].tolist()
    assert made != free[:24]


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("t5", [], "there is no token"),
        ("t5", [97], "is not in the model's vocabulary: got 97"),
        ("t5", [5] * (SOURCE + 1), "too long: got 41 tokens, expected at most 40. Shorten it"),
        pytest.param(
            "whisper", [5], r"takes a spectrogram: got 1 tokens, expected", marks=pytest.mark.slow
        ),
        pytest.param(
            "whisper",
            torch.zeros(1, 16, 49),
            r"got \(1, 16, 49\), expected a tensor of shape \(1, 16, 50\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_invalid_sources_are_refused(name, source, message):
    with pytest.raises(InputError, match=message):
        Generator.load(program(name)).encode(source)


def test_a_source_is_needed_first():
    generator = Generator.load(program("t5"))
    with pytest.raises(InputError, match=r"has no source yet\. Call encode first"):
        generator.feed([3])


@pytest.mark.share(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same_when_it_is_ready(name):
    """Which is tried on a shorter text; here a longer answer in one call."""
    made, source = prepared(name), tiny_source(name)
    given, length = [source], None
    if not FAMILIES[name].audio:
        length = torch.tensor([source.shape[1]])
        given = [torch.nn.functional.pad(source, (0, made.source - source.shape[1])), length]
    caches = [rows for layer in made.layers for rows in layer.empty(CONTEXT, 0).values()]
    tokens, last = torch.tensor([PROMPT]), torch.tensor([len(PROMPT) - 1])
    with torch.no_grad():
        cross = made.encode(*given)
        actual = made.advance(tokens, torch.tensor([0]), caches, cross, length, last)[0]
    logits = logits_of_transformers(model(name), source, PROMPT)[-1]
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual[0], logits, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name):
    config, message, _ = REFUSED[name]
    with pytest.raises(CoreMLDelegateError, match=message):
        EncoderDecoder(tiny_model(name, config), context=CONTEXT, source=SOURCE)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("bart", {"context": 1, "source": 8}, "the context is too short: got 1"),
        ("bart", {"context": 8, "source": 1}, "the source is too short: got 1"),
        ("bart", {"context": CONTEXT + 3, "source": 8}, "has no 83 positions"),
        ("whisper", {"context": CONTEXT + 1}, "has no 81 positions"),
    ],
)
def test_sizes_must_fit_the_model(name, sizes, message):
    with pytest.raises(OptionError, match=message):
        EncoderDecoder(model(name), **sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"suppressed": (4, 5), "first_suppressed": (6,)},
        {"spectrogram": Spectrogram(8000, 80, 200), "start": (1, 2)},
    ],
)
def test_a_layout_with_a_source_is_read_as_it_was_written(changes):
    source = replace(Source(prepared("t5").kind, 40, (3,)), **changes)
    layout = Layout(300, 128, 16, CacheKind.IO, source=source)
    constants = layout.constants()
    assert constants["get_llm_layout_version"] == 3

    def call(name: str) -> list[Any]:
        value = constants[name]
        return value if isinstance(value, list) else [value]

    assert Layout.read(tuple(constants), call) == layout


def test_the_page_lists_the_families():
    text = family_table.PAGE.read_text()
    assert family_table.page(text) == text, "run python -m tests.llm.family_table"
