"""Programs of the standard layout that return the logits of all tokens of a call."""

from __future__ import annotations

import functools

from llm.test_families import CHUNK, CONTEXT, model
from llm.test_standard_layout import VOCABULARY
from support.lowering import fp32_specs

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.targets import Opset


@functools.cache
def program(name: str, cache: CacheKind) -> bytes:
    decoder = Decoder(model(name), context=CONTEXT)
    layout = Layout(VOCABULARY, CONTEXT, CHUNK, cache, standard=True, rewindable=decoder.rewindable)
    has_states = cache is CacheKind.STATE
    specs = fp32_specs(
        compute_precision=Precision.FLOAT32,
        minimum_deployment_target=Opset.iOS18 if has_states else Opset.iOS15,
    )
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=has_states)
    methods = export_methods(decoder, layout, all_logits=True)
    content = lower(methods, layout, partitioner).buffer
    assert len(partitioner.report.partitions) == 1
    return content


def load(name: str, cache: CacheKind) -> Generator:
    return Generator.load(program(name, cache), engine="openvino")
