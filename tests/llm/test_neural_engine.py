"""The form for the neural engine: the logits of transformers, nothing found, and one delegate."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from llm.test_families import CHUNK, CONTEXT, PROMPT, expected, model
from llm.test_standard_layout import LENGTHS, NEW, Runner, greedy, prompt
from support.checkpoints import CONFIG, tiny_model
from support.llm_families import FAMILIES, NEURAL_ENGINE
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import SQNR_NEURAL_ENGINE, SQNR_WEIGHTS, logits_bounds, sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm import neural_engine
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.neural_engine import NeuralEngineDecoder, NeuralEngineForward
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.quantization import mode_of
from coreml_delegate.quantization.configs import neural_engine_stage
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.scripts.cli import main
from coreml_delegate.targets import LARGEST_DIMENSION, ComputeUnit, Opset

LOWERED = (
    *("llama", "gemma3_text"),
    *("qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "ministral", "lfm2", "granite_swa"),
)
"""Families that are lowered; ``make test`` lowers the first two."""

PARAMETERS = [*LOWERED[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in LOWERED[2:])]

THREE_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

MOST_OPS = 111
"""MIL ops for each layer of ExecuTorch's own static Llama with four heads, head by head."""

pytestmark = pytest.mark.xdist_group("neural_engine")


def layout_of(decoder: NeuralEngineDecoder) -> Layout:
    return Layout(decoder.vocabulary, CONTEXT, CHUNK, CacheKind.BUFFER, standard=True)


def lower_decoder(
    decoder: NeuralEngineDecoder,
    target: Opset = Opset.iOS16,
    precision: Precision = Precision.FLOAT16,
    partitions: int = 1,
    **options: Any,
) -> bytes:
    specs = CoreMLBackend.generate_compile_specs(
        compute_unit=ComputeUnit.CPU_AND_NE,
        compute_precision=precision,
        minimum_deployment_target=target,
        **options,
    )
    partitioner = CoreMLPartitioner(compile_specs=specs)
    dtype = torch.float32 if precision is Precision.FLOAT32 else torch.float16
    layout = layout_of(decoder)
    methods = export_methods(decoder, layout, cache_dtype=dtype)
    program = lower(methods, layout, partitioner).buffer
    assert len(partitioner.report.partitions) == partitions, partitioner.report.to_table()
    return program


@functools.cache
def lowered(name: str) -> bytes:
    return lower_decoder(NeuralEngineDecoder(model(name), context=CONTEXT))


def core_ml_model(program: bytes) -> Any:
    """The only Core ML model of a program."""
    (delegate,) = runtime.load_program(program, engine="reference").delegates("forward")
    return delegate.model


def ops_of(program: bytes) -> list[str]:
    return [op.type for op in core_ml_model(program).function.block.ops]


def findings(program: bytes) -> list[str]:
    """The rules of ``check`` with a finding."""
    use = Use("forward_0", "main", ComputeUnit.CPU_AND_NE)
    model = CheckedModel(core_ml_model(program).program, (use,))
    return [finding.rule.name for finding in check([model])]


def steps(forward: Any, tokens: list[int]) -> torch.Tensor:
    """Logits behind ``PROMPT``, and behind each token after it, in eager PyTorch."""
    logits = torch.zeros(0)
    for start in range(0, len(PROMPT), CHUNK):
        chunk = PROMPT[start : start + CHUNK]
        logits = forward(torch.tensor([chunk]), torch.tensor([start]))
    made = [logits]
    for position, token in enumerate(tokens, len(PROMPT)):
        made.append(forward(torch.tensor([[token]]), torch.tensor([position])))
    return torch.cat(made)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", sorted(NEURAL_ENGINE))
@torch.no_grad()
def test_logits_are_those_of_transformers(name):
    """64 tokens are longer than every window, so that rows are replaced."""
    tokens, logits = expected(name)
    decoder = NeuralEngineDecoder(model(name), context=CONTEXT)
    made = steps(NeuralEngineForward(decoder, layout_of(decoder)), tokens)
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(made, logits[len(PROMPT) - 1 :], atol=atol, rtol=rtol)


@pytest.mark.share(8)
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NEURAL_ENGINE))
def test_other_families_are_refused(name):
    plain = model(name)
    with pytest.raises(LoweringError, match=f"{type(plain).__name__}.*Export it without --for"):
        NeuralEngineDecoder(plain, context=CONTEXT)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_file_in_fp16(name):
    program = lowered(name)
    assert findings(program) == []
    core_ml = core_ml_model(program)
    assert {feature.type.dtype for feature in (*core_ml.inputs, *core_ml.outputs)} == {DType.FP16}
    ops = [op for op in ops_of(program) if op != "const"]
    assert len(ops) <= MOST_OPS * CONFIG["num_hidden_layers"]
    assert ops.count("softmax") <= 4 * CONFIG["num_hidden_layers"]
    tokens, logits = expected(name)
    generator = Generator.load(program, engine="reference")
    made = [generator.feed(PROMPT), *(generator.feed([token]) for token in tokens)]
    noise = sqnr_db(logits[len(PROMPT) - 1 :].numpy(), torch.stack(made).numpy())
    assert noise > SQNR_NEURAL_ENGINE
    generator.reset()
    choose = lambda logits: int(logits.argmax())  # noqa: E731 - the interface takes a function
    assert list(generator.generate(PROMPT, choose, limit=NEW)) == tokens[:NEW]


@pytest.mark.parametrize("name", PARAMETERS)
def test_executorchs_runner_writes_the_text_of_transformers(tmp_path, name):
    save_tokenizer(tmp_path / "tokenizer.json", CONFIG["vocab_size"])
    runner = Runner(tmp_path, lowered(name))
    for length in LENGTHS:
        runner.reset()
        assert runner.generate(prompt(length)) == text_of(greedy(name, prompt(length), NEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERED)
def test_a_file_in_fp32_has_the_logits_of_transformers(name):
    decoder = NeuralEngineDecoder(model(name), context=CONTEXT)
    program = lower_decoder(decoder, precision=Precision.FLOAT32)
    tokens, logits = expected(name)
    generator = Generator.load(program, engine="openvino")
    made = [generator.feed(PROMPT), *(generator.feed([token]) for token in tokens)]
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(torch.stack(made), logits[len(PROMPT) - 1 :], atol=atol, rtol=rtol)


# Pieces


@torch.no_grad()
def test_pieces_compute_the_same():
    plain = tiny_model("gemma3_text", **{**FAMILIES["gemma3_text"].changes, **THREE_LAYERS})
    logits = plain(torch.tensor([PROMPT]), use_cache=False).logits[0, -1:]
    for pieces in (2, 3):
        changed = copy.deepcopy(plain)
        decoder = NeuralEngineDecoder(changed, context=CONTEXT, pieces=pieces)
        made = steps(NeuralEngineForward(decoder, layout_of(decoder)), [])
        atol, rtol = logits_bounds(logits)
        torch.testing.assert_close(made, logits, atol=atol, rtol=rtol)
    with pytest.raises(OptionError, match="got 4 pieces, expected 1 to 3"):
        NeuralEngineDecoder(plain, context=CONTEXT, pieces=4)


@pytest.mark.parametrize(
    ("sizes", "pieces", "expected_pieces"),
    [
        ([1, 1, 1, 1, 0], 2, [0, 0, 1, 1]),
        ([1, 1, 1, 1, 1, 1, 1], 3, [0, 0, 1, 1, 1, 2]),
        ([1, 1, 1, 30], 3, [0, 1, 2]),
        ([30, 1, 1, 1, 1], 3, [0, 1, 2, 2]),
        ([2, 2, 2, 2, 4], 2, [0, 0, 0, 1]),
    ],
)
def test_pieces_have_about_equal_sizes(sizes, pieces, expected_pieces):
    assert neural_engine.pieces_of_layers(sizes, pieces) == expected_pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_each_piece_is_a_delegate(name):
    decoder = NeuralEngineDecoder(model(name), context=CONTEXT, pieces=2)
    program = lower_decoder(decoder, partitions=2)
    delegates = runtime.load_program(program, engine="reference").delegates("forward")
    uses = [Use(f"forward_{n}", "main", ComputeUnit.CPU_AND_NE) for n in range(2)]
    models = [CheckedModel(d.model.program, (use,)) for d, use in zip(delegates, uses, strict=True)]
    assert not check(models)
    for delegate in delegates:
        features = (*delegate.model.inputs, *delegate.model.outputs)
        assert {feature.type.dtype for feature in features} == {DType.FP16}
    tokens, logits = expected(name)
    generator = Generator.load(program, engine="reference")
    made = [generator.feed(PROMPT), *(generator.feed([token]) for token in tokens[:NEW])]
    own = logits[len(PROMPT) - 1 : len(PROMPT) + NEW]
    assert sqnr_db(own.numpy(), torch.stack(made).numpy()) > SQNR_NEURAL_ENGINE


# Large and compressed weights

PALETTES = [f"codebook-{bits}-group16" for bits in (4, 6, 8)]

WIDE: Mapping[str, Any] = {
    "vocab_size": 104,  # no multiple of 16
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT,
}


@torch.no_grad()
def test_a_large_vocabulary_is_in_parts():
    """Gemma 2 computes with the logits of all parts, for its soft cap."""
    changes = {**FAMILIES["gemma2"].changes, "num_hidden_layers": 1}
    plain = tiny_model("gemma2", vocab_size=LARGEST_DIMENSION + 40, **changes)
    logits = plain(torch.tensor([PROMPT]), use_cache=False).logits[0, -1:]
    model_parameters = list(plain.parameters())
    decoder = NeuralEngineDecoder(plain, context=CONTEXT)
    made = steps(NeuralEngineForward(decoder, layout_of(decoder)), [])
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(made, logits, atol=atol, rtol=rtol)
    assert [part.weight.shape[0] for part in decoder.head.parts] == [LARGEST_DIMENSION, 48]
    assert decoder.parameter_count == sum(p.numel() for p in model_parameters)


@pytest.mark.slow
def test_nothing_is_found_at_a_real_width():
    """Width, heads and vocabulary of Qwen 2.5 0.5B, one layer."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    plain = tiny_model(
        "qwen2", **{**WIDE, **sizes, "vocab_size": 151_936, "tie_word_embeddings": True}
    )
    program = lower_decoder(NeuralEngineDecoder(plain, context=CONTEXT))
    assert findings(program) == []
    parts = [f.type.shape[1] for f in core_ml_model(program).outputs if len(f.type.shape) == 2]
    assert max(parts) == LARGEST_DIMENSION
    assert sum(parts) == 151_936


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "op", "target"),
    [
        ("int8-channel", "constexpr_affine_dequantize", Opset.iOS16),
        ("int4-channel", "constexpr_blockwise_shift_scale", Opset.iOS18),
        *((mode, "constexpr_lut_to_dense", Opset.iOS18) for mode in PALETTES),
    ],
)
@torch.no_grad()
def test_compressed_weights(mode, op, target):
    plain = tiny_model("llama", **WIDE)
    reference = copy.deepcopy(plain) if mode in PALETTES else with_rounded_weights(plain, mode)
    logits = reference(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    decoder = NeuralEngineDecoder(plain, context=CONTEXT)
    decoder.check_mode(mode_of(mode))
    stage = neural_engine_stage(mode_of(mode))
    program = lower_decoder(decoder, target=target, weight_compression=stage)
    assert findings(program) == []
    assert ops_of(program).count(op) == ops_of(program).count("conv") == 8
    made = Generator.load(program, engine="reference").feed(PROMPT)
    bound = SQNR_WEIGHTS[mode]
    assert sqnr_db(logits.numpy(), made.numpy()) > bound


@torch.no_grad()
def with_rounded_weights(plain: Any, mode: str) -> Any:
    """A model with weights of n bits: symmetric, and a scale for each output."""
    rounded, largest = copy.deepcopy(plain), {"int8-channel": 127, "int4-channel": 7}[mode]
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.half().float()
            scale = (weight.abs().amax(1, keepdim=True) / largest).half().float()
            module.weight.copy_((weight / scale).round().clamp(-largest, largest) * scale)
    return rounded


def test_layers_that_palettes_do_not_divide_are_named():
    decoder = NeuralEngineDecoder(tiny_model("llama", intermediate_size=50), context=CONTEXT)
    with pytest.raises(OptionError, match=r"do not divide .*mlp\.gate_proj: got 50 rows"):
        decoder.check_mode(mode_of("codebook-4-group16"))


@pytest.mark.parametrize("mode", ["int4-group32", "codebook-4", "codebook-5-group16"])
def test_modes_that_the_neural_engine_does_not_have_are_refused(mode):
    with pytest.raises(OptionError, match=f"does not compute with .*: got {mode}, expected int8-"):
        neural_engine_stage(mode_of(mode))


# The command


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({**CONFIG, **WIDE, "model_type": "llama"}))
    return path


def test_the_command(tmp_path, config, capsys):
    path = tmp_path / "model.pte"
    command = [
        "export-llm",
        "--random",
        str(config),
        "-o",
        str(path),
        "--quantize",
        "codebook-4-group16",
    ]
    assert main([*command, "--for", "neural-engine", "--context", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["get_cache_kind"] == "buffer"
    assert report["methods"]["forward"]["partitions"] == 1
    assert main(["check", str(path), "--fail-on", "any"]) == 0
    assert "nothing found" in capsys.readouterr().out
    ops = ops_of(path.read_bytes())
    assert ops.count("constexpr_lut_to_dense") == ops.count("conv") == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "methods"], "Leave out --layout, or --for"),
        (["--cache", "state"], "got --cache state"),
        (["--cache", "io"], "got --cache io"),
        (["--sample-in-model", "argmax"], "got --sample-in-model argmax"),
        (["--adapter", "folder"], "got --adapter"),
        (["--embedding-quantize", "int8"], "got --embedding-quantize int8"),
        (["--group-size", "64"], "got --group-size 64"),
        (["--deployment-target", "iOS15"], "got --deployment-target iOS15"),
        (["--compute-unit", "cpu_and_gpu"], "got --compute-unit cpu_and_gpu"),
    ],
)
def test_contradicting_options_are_refused(tmp_path, config, capsys, options, message):
    path = tmp_path / "model.pte"
    command = ["export-llm", "--random", str(config), "-o", str(path), "--for", "neural-engine"]
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_pieces_need_the_form(tmp_path, config, capsys):
    command = ["export-llm", "--random", str(config), "-o", str(tmp_path / "model.pte")]
    assert main([*command, "--pieces", "2"]) == 1
    assert "Export it with --for neural-engine" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["t5", "llava"])
def test_other_kinds_of_models_are_refused(tmp_path, capsys, kind):
    path = tmp_path / "config.json"
    text = {**CONFIG, "model_type": "llama"}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    images = {"image_token_id": 96, "text_config": text, "vision_config": vision}
    path.write_text(json.dumps({"model_type": kind, **(images if kind == "llava" else {})}))
    command = ["export-llm", "--random", str(path), "-o", str(tmp_path / "model.pte")]
    assert main([*command, "--for", "neural-engine"]) == 1
    assert "has no form for the neural engine" in capsys.readouterr().err


def test_states_are_refused():
    decoder = NeuralEngineDecoder(model("llama"), context=CONTEXT)
    layout = Layout(decoder.vocabulary, CONTEXT, CHUNK, CacheKind.STATE, standard=True)
    with pytest.raises(OptionError, match="expected --cache buffer"):
        NeuralEngineForward(decoder, layout)
