"""Caches in fp16: the logits are those of caches in fp32, which Core ML casts at each call."""

from __future__ import annotations

import pytest
import torch
from llm.test_encoder_decoders import CHUNK, CONTEXT, PROMPT, given, prepared
from llm.test_families import model
from support.multimethod import IOS18
from support.multimethod import specs as specs_of

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.encoder_decoder_methods import export_encoder_decoder
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.source import Source
from coreml_delegate.options.compile_specs import Precision

STEPS = 4

pytestmark = pytest.mark.xdist_group("half_caches")


def _prepared(name: str) -> Decoder | EncoderDecoder:
    if name in ("t5", "whisper"):
        return prepared(name)
    return Decoder(model(name), context=CONTEXT)


def _lowered(made: Decoder | EncoderDecoder, kind: CacheKind, dtype: torch.dtype) -> bytes:
    """A program in fp16, in the layout to which the kind of the caches belongs."""
    is_standard = kind is not CacheKind.IO
    layout = Layout(made.vocabulary, CONTEXT, CHUNK, kind, standard=is_standard)
    if isinstance(made, EncoderDecoder):
        chunk = 1 if is_standard else CHUNK
        source = Source(made.kind, made.source, (3,))
        layout = Layout(made.vocabulary, CONTEXT, chunk, kind, source=source, standard=is_standard)
        methods = export_encoder_decoder(made, layout, cache_dtype=dtype)
    else:
        if not is_standard:
            layout = Layout(made.vocabulary, CONTEXT, CHUNK, kind, replaced=made.replaced)
        methods = export_methods(made, layout, cache_dtype=dtype)
    partitioner = CoreMLPartitioner(
        compile_specs=specs_of("POSITIONAL", compute_precision=Precision.FLOAT16, **IOS18),
        take_over_mutable_buffer=kind is CacheKind.STATE,
    )
    program = lower(methods, layout, partitioner).buffer
    assert {len(report.partitions) for report in partitioner.reports} == {1}
    return program


def _logits(program: bytes, name: str, kind: CacheKind) -> torch.Tensor:
    generator = Generator.load(program, engine="reference")
    if name in ("t5", "whisper"):
        generator.encode(given(name))
    prompt = PROMPT if kind is CacheKind.IO or name != "whisper" else PROMPT[:3]
    logits = [generator.feed(prompt)]
    for _ in range(STEPS):
        logits.append(generator.feed([int(logits[-1].argmax())]))
    return torch.stack(logits)


def _check_features(program: bytes) -> None:
    """Check that all floats that enter a decoder are fp16, and that none is cast."""
    opened = runtime.load_program(program, engine="reference")
    for method in {"decode", "prefill", "forward", "text_decoder"} & set(opened.method_names):
        (delegate,) = opened.delegates(method)
        inputs = {feature.name: feature.type.dtype.label for feature in delegate.model.inputs}
        floats = {name for name, dtype in inputs.items() if dtype != "int32"}
        assert {inputs[name] for name in floats} == {"fp16"}
        operations = delegate.model.function.block.ops
        cast = {ref.name for op in operations if op.type == "cast" for ref in op.inputs["x"]}
        assert not cast & floats


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", CacheKind.BUFFER),
        pytest.param("lfm2", CacheKind.IO, marks=pytest.mark.slow),
        pytest.param("whisper", CacheKind.STATE, marks=pytest.mark.slow),
        pytest.param("t5", CacheKind.IO, marks=pytest.mark.slow),
        pytest.param("whisper", CacheKind.BUFFER, marks=pytest.mark.slow),
        pytest.param("mamba2", CacheKind.BUFFER, marks=pytest.mark.slow),
        pytest.param("gemma3_text", CacheKind.IO, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_caches_in_fp32(name: str, kind: CacheKind) -> None:
    made = _prepared(name)
    wide, half = (_lowered(made, kind, dtype) for dtype in (torch.float32, torch.float16))
    _check_features(half)
    assert torch.equal(_logits(wide, name, kind), _logits(half, name, kind))
