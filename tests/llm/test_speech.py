"""Parakeet models beside transformers: features, frames, steps of the decoder, and transcripts."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lowering import fp32_specs
from support.tolerances import ATOL_RTOL, ATOL_RTOL_LOGITS, SQNR_FP16, SQNR_WEIGHTS, sqnr_db

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import InputError, LoweringError, OptionError, ProgramError
from coreml_delegate.llm.decoder_methods import is_core_ml
from coreml_delegate.llm.export import quantize_weights
from coreml_delegate.llm.speech import (
    Encoder,
    Recognizer,
    export_recognizer,
    load_recognizer,
)
from coreml_delegate.llm.speech_features import FP32_MODULES, FeatureSettings
from coreml_delegate.llm.transcriber import Transcriber
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.quantization import QuantizationAssignment, mode_of

RATE, BINS, WIDTH, BLANK, SECONDS = 16000, 16, 24, 32, 2.0
ENCODER = {
    "model_type": "parakeet_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_mel_bins": BINS,
    "subsampling_conv_channels": 8,
    # Weights that are smaller than those of trained models make values that fp16 does not hold.
    "initializer_range": 0.2,
}
CONFIG = {"vocab_size": BLANK + 1, "encoder_config": ENCODER}
TRANSDUCER = {**CONFIG, "decoder_hidden_size": WIDTH, "blank_token_id": BLANK}
KINDS = [
    pytest.param("tdt", id="tdt"),
    pytest.param("rnnt", id="rnnt", marks=pytest.mark.slow),
    pytest.param("ctc", id="ctc", marks=pytest.mark.slow),
]
ENGINES = ("openvino", "reference")
HOSTS = ("python", "stock")
LENGTHS = (1600, 12345, 31999, 32000)
"""Samples of recordings: the last is the longest."""


def recording(count: int) -> np.ndarray:
    """Noise of a varying loudness."""
    noise = np.random.default_rng(0).standard_normal(count)
    return (noise * 0.1 * (1 + np.sin(np.arange(count) / 2000))).astype(np.float32)


def features(samples: np.ndarray) -> dict[str, torch.Tensor]:
    extract = transformers().ParakeetFeatureExtractor(feature_size=BINS)
    return dict(extract(samples, sampling_rate=RATE, return_tensors="pt"))


def one_recording(samples: np.ndarray) -> torch.Tensor:
    """Features [1, T, F] without the last frame, which is no frame of the recording."""
    inputs = features(samples)
    return inputs["input_features"][:, : int(inputs["attention_mask"].sum())]


@torch.no_grad()
def make(kind: str, seed: int = 1, **changes: Any) -> Any:
    """A tiny model of random weights, whose tokens vary with the frame."""
    torch.manual_seed(seed)
    library = transformers()
    keys = {**CONFIG, "pad_token_id": BLANK} if kind == "ctc" else TRANSDUCER
    config = library.AutoConfig.for_model(f"parakeet_{kind}", **{**keys, **changes})
    auto = getattr(library, f"AutoModelFor{kind.upper()}")
    model = auto.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    if kind != "ctc":
        model.generation_config.decoder_start_token_id = BLANK
        for weight in (*model.decoder.parameters(), model.joint.head.weight):
            weight.normal_(0, 0.5)
        bias = model.joint.head.bias
        start = torch.full((1, 1), BLANK)
        logits = model(one_recording(recording(RATE)), decoder_input_ids=start).logits
        bias -= logits.flatten(0, -2).mean(0)  # otherwise one token is the best of every frame
        bias[BLANK] += {"tdt": 1, "rnnt": 2}[kind]
        bias[BLANK + 1 :] -= 100  # generate takes the best of tokens and durations
    return model


def lower(recognizer: Recognizer, precision: Precision = Precision.FLOAT32) -> bytes:
    """The ``.pte``, of which Core ML computes all but the padding of the samples."""
    specs = fp32_specs(compute_precision=precision, keep_fp32={"modules": FP32_MODULES})
    partitioner = CoreMLPartitioner(compile_specs=specs)
    methods = export_recognizer(recognizer)
    program = lower_methods(methods, partitioner, recognizer.constants())
    for name, report in zip(methods, partitioner.reports, strict=True):
        report.require_kernels()
        assert len(report.partitions) == 1
        if name in ("preprocessor", "encoder"):  # whose lengths stay outside
            assert not any(is_core_ml(node.module) for node in report.undelegated)
        else:
            assert not report.undelegated
    return program.buffer


@cache
def lowered(kind: str) -> tuple[Any, bytes]:
    """A model and its ``.pte``, in fp32."""
    model = make(kind)
    return model, lower(Recognizer(model, FeatureSettings(BINS), SECONDS))


def loaded(kind: str, *, engine: str = "openvino", host: str = "python") -> runtime.HostProgram:
    return runtime.load_program(lowered(kind)[1], engine=engine, host=host)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("host", HOSTS)
def test_features_are_those_of_transformers(host, engine):
    transcribe = Transcriber(loaded("tdt", engine=engine, host=host))
    assert (transcribe.sampling_rate, transcribe.samples) == (RATE, SECONDS * RATE)
    atol, rtol = ATOL_RTOL_LOGITS
    for count in LENGTHS:
        expected = one_recording(recording(count))[0].T
        actual, length = transcribe.features(recording(count))
        assert (actual.shape, length.dtype) == ((1, BINS, 200), torch.int64)
        assert length.tolist() == [count // 160]
        torch.testing.assert_close(actual[0, :, :length], expected, atol=atol, rtol=rtol)
        assert not actual[0, :, length:].any()


def test_a_single_frame_has_features_of_zero():
    """Features of transformers are nan: it divides by the number of frames less one."""
    transcribe = Transcriber(loaded("tdt"))
    actual, length = transcribe.features(recording(170))
    assert length.tolist() == [1]
    assert not actual.any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_the_recording_without_padding(kind, engine):
    model = lowered(kind)[0]
    program = loaded(kind, engine=engine)
    atol, rtol = ATOL_RTOL_LOGITS
    for count in LENGTHS:
        inputs = one_recording(recording(count))
        states = model.encoder(inputs).last_hidden_state
        expected = model.ctc_head(states) if kind == "ctc" else model.encoder_projector(states)
        length = inputs.shape[1]
        padded = torch.cat((inputs, torch.zeros(1, 200 - length, BINS)), dim=1)
        actual, frames = program.run("encoder", [padded.transpose(1, 2), torch.tensor([length])])
        assert frames.tolist() == [expected.shape[1]]
        assert frames.dtype == torch.int64
        torch.testing.assert_close(actual[:, : int(frames)], expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_steps_and_tokens_are_those_of_the_networks(kind, engine):
    model = lowered(kind)[0]
    program = loaded(kind, engine=engine)
    h, c = (torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    vector, *states = program.run("decoder_step", [torch.tensor([[5]]), h, c])
    output, new = model.decoder.lstm(model.decoder.embedding(torch.tensor([[5]])), (h, c))
    atol, rtol = ATOL_RTOL["fp32"]
    for actual, expected in zip(
        (vector, *states), (model.decoder.decoder_projector(output), *new), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    frames = torch.randn(20, 1, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    results = [[int(value) for value in program.run("joint", [f, vector])] for f in frames]
    logits = [model.joint(vector, frame).flatten() for frame in frames]
    tokens = [int(scores[: BLANK + 1].argmax()) for scores in logits]
    if kind == "tdt":
        durations = [int(scores[BLANK + 1 :].argmax()) for scores in logits]
    else:
        durations = [int(token == BLANK) for token in tokens]
    assert results == [list(pair) for pair in zip(tokens, durations, strict=True)]
    assert len(set(tokens)) > 1
    assert len(set(durations)) > 1


def is_ctc(model: Any) -> bool:
    return model.config.model_type == "parakeet_ctc"


def generated(model: Any, samples: np.ndarray) -> list[tuple[int, float]]:
    """The tokens of transformers, with their times in seconds."""
    limit = {} if is_ctc(model) else {"max_new_tokens": 10 * len(samples) // 1280 + 10}
    result = model.generate(**features(samples), **limit)
    if is_ctc(model):
        groups = itertools.groupby(enumerate(result[0].tolist()), key=lambda pair: pair[1])
        firsts = [(token, next(group)[0]) for token, group in groups]
    else:
        starts = (result.durations.cumsum(1) - result.durations)[0].tolist()
        firsts = list(zip(result.sequences[0].tolist(), starts, strict=True))
    return [(token, frame * 0.08) for token, frame in firsts if token != BLANK]


@pytest.mark.parametrize("kind", KINDS)
def test_transcripts_are_those_of_transformers(kind):
    model = lowered(kind)[0]
    transcribe = Transcriber(loaded(kind))
    found: set[int] = set()
    for count in LENGTHS:
        expected = generated(model, recording(count))
        actual = transcribe(recording(count))
        assert [(token.number, pytest.approx(token.start)) for token in actual] == expected
        found |= {token.number for token in actual}
    assert len(found) > 2


def run_as_executorch(program: runtime.HostProgram, samples: np.ndarray) -> list[int]:
    """The calls of ExecuTorch's C++ runner (examples/models/parakeet/main.cpp), in its order.

    It pads the samples to whole hops, passes what a method returns to the next one, has its own
    table of durations, and ends a frame after ten tokens.
    """
    audio = torch.from_numpy(np.pad(samples, (0, -len(samples) % 160)))
    mel, mel_length = program.run("preprocessor", [audio, torch.tensor([len(samples)])])
    frames, length = program.run("encoder", [mel, torch.tensor([int(mel_length[0])])])
    facts = [program.run(name, [])[0] for name in ("num_rnn_layers", "pred_hidden", "blank_id")]
    layers, hidden, blank = facts
    state = [torch.zeros(layers, 1, hidden), torch.zeros(layers, 1, hidden)]
    g, *state = program.run("decoder_step", [torch.tensor([[blank]]), *state])
    tokens: list[int] = []
    t = symbols = 0
    while t < int(length[0]):
        values = program.run("joint", [frames[:, t : t + 1].contiguous(), g])
        assert [value.dtype for value in values] == [torch.int64, torch.int64]
        token, duration = int(values[0][0]), (0, 1, 2, 3, 4)[int(values[1][0])]
        if token == blank:
            t, symbols = t + max(duration, 1), 0
            continue
        tokens.append(token)
        g, *state = program.run("decoder_step", [torch.tensor([[token]]), *state])
        t += duration
        symbols = symbols + 1 if duration == 0 else 0
        if symbols >= 10:
            t, symbols = t + 1, 0
    return tokens


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_executorchs_runner_finds_the_same(kind, host):
    model = lowered(kind)[0]
    program = loaded(kind, host=host)
    for count in (LENGTHS[1], LENGTHS[-1]):
        expected = [token for token, _ in generated(model, recording(count))]
        assert run_as_executorch(program, recording(count)) == expected


def test_constants_are_those_of_executorchs_runner():
    program = loaded("tdt")
    expected = {
        "num_rnn_layers": 2,
        "pred_hidden": WIDTH,
        "joint_hidden": WIDTH,
        "vocab_size": BLANK,
        "blank_id": BLANK,
        "sample_rate": RATE,
        "window_stride": 0.01,
        "encoder_subsampling_factor": 8,
    }
    assert {name: program.run(name, [])[0] for name in expected} == expected


@pytest.mark.slow
def test_a_frame_has_only_so_many_tokens():
    model = make("rnnt", max_symbols_per_step=3)
    model.joint.head.bias[BLANK] -= 100
    data = lower(Recognizer(model, FeatureSettings(BINS), SECONDS))
    transcribe = Transcriber(runtime.load_program(data))
    samples = recording(LENGTHS[1])
    tokens = transcribe(samples)
    assert [(token.number, pytest.approx(token.start)) for token in tokens] == generated(
        model, samples
    )
    assert len(tokens) == 3 * 10


def frames_of(data: bytes) -> np.ndarray:
    """Frames of a recording, or logits of CTC, on the reference engine."""
    transcribe = Transcriber(runtime.load_program(data, engine="reference"))
    return transcribe.encode(*transcribe.features(recording(LENGTHS[1]))).numpy()


@pytest.mark.slow
def test_fp16_stays_close():
    plain = lowered("tdt")[1]
    data = lower(
        Recognizer(make("tdt"), FeatureSettings(BINS), SECONDS), precision=Precision.FLOAT16
    )
    assert sqnr_db(frames_of(plain), frames_of(data)) > SQNR_FP16
    transcribe = Transcriber(runtime.load_program(data, engine="reference"))
    actual, _ = transcribe.features(recording(LENGTHS[-1]))
    expected = one_recording(recording(LENGTHS[-1]))[0].T
    # Computed in fp32, and rounded for the encoder.
    atol, rtol = ATOL_RTOL["fp16"]
    torch.testing.assert_close(actual[0], expected, atol=atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tdt", "ctc"])
def test_linear_layers_are_quantized(kind):
    recognizer = Recognizer(make(kind), FeatureSettings(BINS), SECONDS)
    quantize_weights(recognizer, linear=QuantizationAssignment(mode_of("int8-channel")))
    data, plain = lower(recognizer), lowered(kind)[1]
    quality = sqnr_db(frames_of(plain), frames_of(data))
    assert SQNR_WEIGHTS["int8-channel"] - 15 < quality < SQNR_WEIGHTS["int8-channel"] + 20
    assert len(data) < len(plain)


def test_models_without_an_embedding_quantize_none():
    recognizer = Recognizer(make("ctc"), FeatureSettings(BINS), SECONDS)
    with pytest.raises(OptionError, match="the model has no embedding: got mode int8-channel"):
        quantize_weights(recognizer, embedding=mode_of("int8-channel"))


@pytest.mark.parametrize("kind", ["tdt", "rnnt", "ctc"])
def test_checkpoints_are_read(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    settings = {"feature_size": BINS, "hop_length": 160, "win_length": 320, "n_fft": 400}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    recognizer = load_recognizer(tmp_path, tmp_path / "config.json", seconds=SECONDS)
    assert recognizer.kind.value == kind
    assert recognizer.settings == FeatureSettings(BINS, window=320, fft_size=400)
    extract = transformers().ParakeetFeatureExtractor(
        feature_size=BINS, win_length=320, n_fft=400, preemphasis=0.97
    )
    samples = recording(LENGTHS[1])
    inputs = extract(samples, sampling_rate=RATE, return_tensors="pt")["input_features"][:, :77]
    actual, length = recognizer.features(torch.from_numpy(samples), torch.tensor([len(samples)]))
    assert length.tolist() == [77]
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(actual[0, :, :77], inputs[0].T, atol=atol, rtol=rtol)
    frames, count = recognizer.encoder(actual, length)
    expected, _ = Encoder(model, 200)(actual, length)
    torch.testing.assert_close(frames[:, : int(count)], expected[:, : int(count)])


def recognizer_of(seconds: float = SECONDS, bins: int = BINS, **changes: Any) -> Recognizer:
    return Recognizer(make("tdt", **changes), FeatureSettings(bins), seconds)


def test_wrong_sizes_are_refused():
    with pytest.raises(OptionError, match=r"of this length: got 60 s, expected 0\.08 to 50 s"):
        recognizer_of(60)
    with pytest.raises(OptionError, match=r"of this length: got 0\.05 s"):
        recognizer_of(0.05)
    with pytest.raises(OptionError, match="do not fit its encoder: got 80 bins, expected 16 bins"):
        recognizer_of(bins=80)
    with pytest.raises(OptionError, match=r"durations that are not supported: got \[0, 1, 2, 4\]"):
        recognizer_of(durations=[0, 1, 2, 4])


def test_an_encoder_that_computes_something_else_is_refused():
    def hook(module: Any, inputs: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state * 2

    model = make("tdt")
    model.encoder.register_forward_hook(hook)  # not called with the parts of the encoder
    with pytest.raises(LoweringError, match="ParakeetForTDT encodes otherwise than"):
        Recognizer(model, FeatureSettings(BINS), SECONDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hop_length": 0}, "a hop_length that is not supported: got 0"),
        ({"preemphasis": "much"}, 'a preemphasis that is not supported: got "much"'),
        ({"win_length": 600}, "a window that is longer .*: got 600 samples, expected at most 512"),
    ],
)
def test_wrong_settings_are_refused(settings, message, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(OptionError, match=message):
        FeatureSettings.read(tmp_path, BINS)


@pytest.mark.parametrize(
    ("samples", "got"),
    [
        (np.zeros(0, np.float32), r"0\.00 s"),
        (np.zeros(32001, np.float32), r"2\.00 s, .* at most 2\.00 s"),
        (np.zeros((2, 100), np.float32), r"shape \[2, 100\]"),
    ],
)
def test_wrong_recordings_are_refused(samples, got):
    with pytest.raises(InputError, match=f"not one recording that the program takes: got {got}"):
        Transcriber(loaded("tdt"))(samples)


def test_other_programs_are_refused(tmp_path: Path):
    from support.command import tiny_pte

    (tmp_path / "tiny.pte").write_bytes(tiny_pte())
    with pytest.raises(ProgramError, match="does not recognize speech: got the methods forward"):
        Transcriber.load(tmp_path / "tiny.pte")
