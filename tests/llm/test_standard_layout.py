"""The standard layout in ExecuTorch's own runner and in ours: the text of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from llm.test_families import CHUNK, CONTEXT, model
from support.checkpoints import CONFIG
from support.llm_families import FAMILIES, WINDOW
from support.lowering import fp32_specs
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import logits_bounds
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import (
    CoreMLDelegateError,
    InputError,
    OptionError,
    ProgramError,
)
from coreml_delegate.llm import executorch_runner
from coreml_delegate.llm.candidates import Selection
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.decoder_methods import StandardForward
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition.export import plan
from coreml_delegate.scripts.commands import export_llm
from coreml_delegate.targets import Opset

VOCABULARY = CONFIG["vocab_size"]
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)
NEW = 12
SAMPLE = {CacheKind.STATE: "llama", CacheKind.BUFFER: "gemma3_text"}
"""The family of most tests, by the kind of the caches."""

pytestmark = pytest.mark.xdist_group("standard")


def prompt(length: int) -> list[int]:
    random = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (length,), generator=random).tolist()


@torch.no_grad()
def greedy(name: str, tokens: Sequence[int], count: int) -> list[int]:
    """The most probable tokens of transformers, computed on whole texts."""
    module, text = model(name), list(tokens)
    for _ in range(count):
        text.append(int(module(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]


@functools.cache
def lowered(name: str, cache: CacheKind) -> bytes:
    decoder = Decoder(model(name), context=CONTEXT)
    layout = Layout(VOCABULARY, CONTEXT, CHUNK, cache, standard=True)
    has_states = cache is CacheKind.STATE
    specs = fp32_specs(
        compute_precision=Precision.FLOAT32,
        minimum_deployment_target=Opset.iOS18 if has_states else Opset.iOS15,
    )
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=has_states)
    program = lower(export_methods(decoder, layout), layout, partitioner).buffer
    assert len(partitioner.report.partitions) == 1
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standard")
    save_tokenizer(folder / "tokenizer.json", VOCABULARY)
    return folder


class Runner:
    """ExecuTorch's ``TextLLMRunner`` for a program."""

    def __init__(self, folder: Path, program: bytes, name: str = "model") -> None:
        from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

        path = folder / f"{name}.pte"
        path.write_bytes(program)
        runtime.register(engine="openvino")
        self._config = GenerationConfig
        self._runner = TextLLMRunner(str(path), str(folder / "tokenizer.json"))
        self.reset: Callable[[], None] = self._runner.reset

    def generate(self, tokens: Sequence[int], count: int = NEW) -> str:
        pieces: list[str] = []
        self.generate_into(pieces, tokens, count)
        return "".join(pieces)

    def generate_into(self, pieces: list[str], tokens: Sequence[int], count: int) -> None:
        config = self._config(echo=False, temperature=0.0, max_new_tokens=count)
        self._runner.generate(text_of(tokens), config, pieces.append, None)


def check_texts(runner: Runner, name: str) -> None:
    for length in LENGTHS:
        runner.reset()
        assert runner.generate(prompt(length)) == text_of(greedy(name, prompt(length), NEW))


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(
            name, CacheKind.BUFFER, marks=() if name == "gemma3_text" else pytest.mark.slow
        )
        for name in FAMILIES
    ]
    + [
        pytest.param(name, CacheKind.STATE, marks=() if name == "llama" else pytest.mark.slow)
        for name in ("llama", "mistral", "gemma3_text", "bloom", "mamba", "mamba2", "lfm2")
    ],
)
def test_executorchs_runner_writes_the_text_of_transformers(folder, name, cache):
    check_texts(Runner(folder, lowered(name, cache)), name)


@pytest.mark.parametrize("cache", SAMPLE)
def test_a_second_call_continues_the_text(folder, cache):
    """The runner never feeds the last token of a call."""
    name = SAMPLE[cache]
    runner, first, second = Runner(folder, lowered(name, cache)), prompt(5), prompt(11)
    before = greedy(name, first, NEW)
    assert runner.generate(first) == text_of(before)
    after = greedy(name, [*first, *before[:-1], *second], NEW)
    assert runner.generate(second) == text_of(after)


def test_two_programs_are_independent(folder):
    runners = [Runner(folder, lowered("llama", CacheKind.STATE), str(n)) for n in range(2)]
    texts = [prompt(5), prompt(9)]
    made = [runner.generate(text, 4) for runner, text in zip(runners, texts, strict=True)]
    assert made == [text_of(greedy("llama", text, 4)) for text in texts]
    for runner, text in zip(runners, texts, strict=True):
        earlier = [*text, *greedy("llama", text, 4)[:-1]]
        assert runner.generate(prompt(3)) == text_of(greedy("llama", [*earlier, *prompt(3)], NEW))


@pytest.mark.parametrize("cache", SAMPLE)
def test_the_end_of_the_context_is_an_error(folder, cache):
    name = SAMPLE[cache]
    runner, pieces = Runner(folder, lowered(name, cache)), []
    with pytest.raises(RuntimeError, match="Generation failed"):
        runner.generate_into(pieces, prompt(3), 2 * CONTEXT)
    room = CONTEXT - 3 + 1  # the last token is not fed
    assert "".join(pieces) == text_of(greedy(name, prompt(3), room))
    runner.reset()
    assert runner.generate(prompt(3)) == text_of(greedy(name, prompt(3), NEW))


@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("cache", SAMPLE)
def test_our_generator_runs_the_same_file(cache, host):
    name = SAMPLE[cache]
    generator = Generator.load(lowered(name, cache), engine="openvino", host=host)
    for length in LENGTHS:
        generator.reset()
        made = generator.generate(prompt(length), lambda logits: int(logits.argmax()), limit=NEW)
        assert list(made) == greedy(name, prompt(length), NEW)
    generator.reset()
    with pytest.raises(InputError, match="the context of 96 tokens is too short"):
        generator.feed(prompt(CONTEXT + 1))


@pytest.mark.parametrize("cache", SAMPLE)
def test_executorch_has_kernels_for_the_other_calls(cache):
    from executorch.runtime import Runtime

    operators = (
        runtime.load_program(lowered(SAMPLE[cache], cache)).program.method("forward").operators
    )
    assert len(operators) > 5
    assert operators.keys() <= Runtime.get().operator_registry.operator_names


# Programs of other exporters


@functools.cache
def foreign(*, dynamic: bool) -> bytes:
    """A language model as transformers' recipe for ExecuTorch exports it, without Core ML."""
    from transformers.integrations.executorch import convert_and_export_with_cache

    module = model("llama")
    module.generation_config.update(
        use_cache=True,
        cache_implementation="static",
        max_length=CONTEXT,
        cache_config={"batch_size": 1, "max_cache_len": CONTEXT},
    )
    options: dict[str, Any] = {}
    if dynamic:
        count = torch.export.Dim("count", max=CONTEXT - 1)
        options = {
            "example_input_ids": torch.zeros(1, 3, dtype=torch.long),
            "example_cache_position": torch.arange(3),
            "dynamic_shapes": {"input_ids": {1: count}, "cache_position": {0: count}},
        }
    program = convert_and_export_with_cache(module, **options)
    constants = {
        "get_max_seq_len": CONTEXT - 1,
        "get_max_context_len": CONTEXT,
        "enable_dynamic_shape": dynamic,
        "use_kv_cache": True,
        "get_eos_ids": [2],
    }
    return to_edge_transform_and_lower(program, constant_methods=constants).to_executorch().buffer


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_program_of_another_exporter_generates(dynamic):
    generator = Generator.load(foreign(dynamic=dynamic))
    layout = generator.layout
    assert (layout.context, layout.chunk) == (CONTEXT, CONTEXT - 1 if dynamic else 1)
    assert (layout.eos, layout.standard, layout.vocabulary) == ((2,), True, VOCABULARY)
    tokens = greedy("llama", prompt(5), NEW)
    made = [generator.feed(prompt(5)), *(generator.feed([token]) for token in tokens)]
    with torch.no_grad():
        whole = model("llama")(torch.tensor([[*prompt(5), *tokens]]), use_cache=False).logits[0]
    atol, rtol = logits_bounds(whole)
    torch.testing.assert_close(torch.stack(made), whole[4:], atol=atol, rtol=rtol)


# Layouts and errors


def test_constants_are_those_of_the_contract_and_are_read_back():
    for layout in (
        Layout(300, 128, 16, CacheKind.STATE, bos=1, eos=(2, 3), standard=True),
        Layout(300, 128, 16, CacheKind.BUFFER, adapters=("french",), standard=True),
    ):
        constants = layout.constants()
        assert {"get_max_seq_len", "get_max_context_len", "use_kv_cache"} <= constants.keys()
        assert constants["enable_dynamic_shape"] is True
        assert layout.methods_of(None) == ("forward",)

        def call(name: str, constants: dict[str, Any] = constants) -> list[Any]:
            value = constants[name]
            return value if isinstance(value, list) else [value]

        assert Layout.read(tuple(constants), call) == layout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": CacheKind.IO}, "got io in the layout standard, expected state or buffer"),
        (
            {"cache": CacheKind.STATE, "selection": Selection.parse("argmax")},
            "take logits: got argmax",
        ),
        (
            {"cache": CacheKind.BUFFER, "standard": False},
            "got buffer in the layout methods, expected io or state",
        ),
    ],
)
def test_impossible_layouts_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Layout(**{"vocabulary": 97, "context": 64, "chunk": 8, "standard": True, **options})


@pytest.mark.parametrize("skipped", [None, ["silu"]])
def test_calls_of_the_model_on_the_cpu_are_told_from_those_of_the_layout(skipped):
    layout = Layout(VOCABULARY, CONTEXT, CHUNK, CacheKind.STATE, standard=True)
    program = export_methods(Decoder(model("llama"), context=CONTEXT), layout)["forward"]
    partitioner = CoreMLPartitioner(
        compile_specs=fp32_specs(minimum_deployment_target=Opset.iOS18),
        skip_ops_for_coreml_delegation=skipped,
    )
    report = plan(program, partitioner)
    assert report.undelegated
    assert export_llm._left_on_cpu("forward", report, layout) == (skipped is not None)


def test_a_chunk_longer_than_a_window_needs_states():
    decoder = Decoder(model("mistral"), context=CONTEXT)
    layout = Layout(VOCABULARY, CONTEXT, WINDOW + 1, CacheKind.BUFFER, standard=True)
    with pytest.raises(OptionError, match=f"got {WINDOW + 1} tokens, expected at most {WINDOW}"):
        StandardForward(decoder, layout)
    StandardForward(decoder, replace(layout, cache=CacheKind.STATE))
    StandardForward(decoder, replace(layout, chunk=WINDOW))


def test_errors_of_executorchs_runner_are_named(folder):
    path, tokenizer = folder / "errors.pte", folder / "tokenizer.json"
    path.write_bytes(lowered("llama", CacheKind.STATE))
    result = executorch_runner.generate(path, tokenizer, "AB", limit=5, engine="openvino")
    assert result.text
    assert (result.prefill.tokens, result.decode.tokens) == (2, 4)
    cases: list[tuple[dict[str, Any], type[CoreMLDelegateError], str]] = [
        ({"temperature": 1.5}, OptionError, "got 1.5, expected 0 to 1"),
        ({"prompt": "A" * CONTEXT}, OptionError, "expected 1 to 95"),
        ({"path": folder / "none.pte"}, CoreMLDelegateError, "none.pte"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            executorch_runner.generate(
                **{"path": path, "tokenizer": tokenizer, "prompt": "AB", **options}
            )
    broken = folder / "broken.json"
    broken.write_text("{}")
    with pytest.raises(OptionError, match="cannot read a tokenizer"):
        executorch_runner.generate(path, broken, "AB")


def test_other_programs_are_refused_by_the_runner(folder):
    path = folder / "relu.pte"
    module = torch.export.export(nn.ReLU(), (torch.zeros(2),))
    path.write_bytes(to_edge_transform_and_lower(module).to_executorch().buffer)
    with pytest.raises(ProgramError, match="not a language model"):
        executorch_runner.generate(path, folder / "tokenizer.json", "AB")


def test_logits_are_those_of_transformers():
    tokens = greedy("gemma3_text", prompt(13), 64)
    generator = Generator.load(lowered("gemma3_text", CacheKind.BUFFER), engine="openvino")
    with torch.no_grad():
        text = torch.tensor([[*prompt(13), *tokens]])
        whole = model("gemma3_text")(text, use_cache=False).logits[0]
    made = [generator.feed(prompt(13)), *(generator.feed([token]) for token in tokens)]
    atol, rtol = logits_bounds(whole)
    torch.testing.assert_close(torch.stack(made), whole[12:], atol=atol, rtol=rtol)
