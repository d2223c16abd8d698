"""``export-llm`` and ``generate`` for encoder-decoder models: files, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from llm.test_audio import RATE, noise, write
from support.command import leftovers
from support.encoder_decoder_families import FAMILIES, tiny_model

from coreml_delegate.llm.generator import Generator
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("encoder_decoders")

BYTES = {"vocab_size": 256, "eos_token_id": None, "bos_token_id": None}
WHISPER = {**FAMILIES["whisper"].config, **BYTES, "model_type": "whisper"}
T5 = {**FAMILIES["t5"].config, **BYTES, "model_type": "t5"}
MOONSHINE = {**FAMILIES["moonshine"].config, **BYTES, "model_type": "moonshine"}
QUICK = ["--precision", "float32", "--context", "24"]


@pytest.fixture(scope="module", autouse=True)
def _torchao():
    # It is logged about while it is imported, which is no output of the command.
    import torchao.quantization  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoder_decoders")


def export(source: list[str], path: Path, *options: str) -> int:
    return main(["export-llm", *source, "-o", str(path), *options])


@pytest.fixture(scope="module")
def whisper(folder):
    """A checkpoint, as transformers saves it, and the file that the command makes of it."""
    library, checkpoint = transformers(), folder / "whisper"
    sizes = {**FAMILIES["whisper"].config, **BYTES, "max_source_positions": 50}
    model = tiny_model("whisper", sizes)
    model.generation_config.suppress_tokens = [5, 6]
    model.generation_config.begin_suppress_tokens = [7]
    model.save_pretrained(checkpoint)
    extract = library.WhisperFeatureExtractor(feature_size=16, hop_length=80, n_fft=200)
    extract.save_pretrained(checkpoint)
    assert export([str(checkpoint)], folder / "whisper.pte", *QUICK) == 0
    return model, folder / "whisper.pte"


@pytest.fixture(scope="module")
def t5(folder):
    (folder / "t5.json").write_text(json.dumps(T5))
    source = ["--random", str(folder / "t5.json")]
    assert export(source, folder / "t5.pte", *QUICK, "--source-length", "12") == 0
    return folder / "t5.pte"


@pytest.mark.slow
def test_a_recording_is_transcribed(whisper, folder, capsys):
    model, program = whisper
    recording = write(folder / "a.wav", noise(RATE // 4))
    options = ["--prompt-tokens", "10", "11", "--max-new-tokens", "16", "--json"]
    capsys.readouterr()
    assert main(["generate", str(program), "--audio", str(recording), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["encode"]["tokens"] == 100
    extract = transformers().WhisperFeatureExtractor.from_pretrained(folder / "whisper")
    samples = (noise(RATE // 4) / 2**15).astype(np.float32)
    features = extract(samples, sampling_rate=RATE, max_length=8000, return_tensors="pt")
    # Whisper's own method chooses the tokens that an answer begins with by itself.
    theirs = transformers().GenerationMixin.generate(
        model,
        input_features=features["input_features"],
        decoder_input_ids=torch.tensor([[3, 10, 11]]),
        max_new_tokens=16,
        do_sample=False,
    )
    assert document["tokens"] == theirs[0, 3:].tolist()
    assert document["tokens"][0] != 7


@pytest.mark.slow
def test_samples_are_transcribed(folder, capsys):
    """A recording that is shorter than the program's, as transformers transcribes it."""
    checkpoint, program = folder / "moonshine", folder / "moonshine.pte"
    model = tiny_model("moonshine", {**FAMILIES["moonshine"].config, **BYTES})
    model.save_pretrained(checkpoint)
    extract = transformers().Wav2Vec2FeatureExtractor(do_normalize=False)
    extract.save_pretrained(checkpoint)
    assert export([str(checkpoint)], program, *QUICK, "--source-length", "8000") == 0
    assert "8,000 samples of audio" in capsys.readouterr().out
    recording = write(folder / "b.wav", noise(RATE // 4))
    options = ["--max-new-tokens", "16", "--json"]
    assert main(["generate", str(program), "--audio", str(recording), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["encode"]["tokens"] == RATE // 4
    samples = (noise(RATE // 4) / 2**15).astype(np.float32)
    inputs = extract(samples, sampling_rate=RATE, return_tensors="pt")["input_values"]
    theirs = model.generate(inputs, max_new_tokens=16, do_sample=False)
    assert document["tokens"] == theirs[0, 1:].tolist()
    capsys.readouterr()
    assert main(["generate", str(program), "--audio", str(recording), "--max-new-tokens", "2"]) == 0
    assert "encode: 4000 samples in" in capsys.readouterr().err
    extract.do_normalize = True
    extract.save_pretrained(checkpoint)
    assert export([str(checkpoint)], folder / "refused.pte", *QUICK) == 1
    assert "normalized before the encoder are not supported" in capsys.readouterr().err


@pytest.mark.slow
def test_facts_of_a_checkpoint_are_in_the_file(whisper):
    source = Generator.load(whisper[1]).layout.source
    assert source is not None
    assert (source.kind.value, source.length, source.start) == ("audio", 100, (3,))
    assert (source.suppressed, source.first_suppressed) == ((5, 6), (7,))
    how = source.spectrogram
    assert (how.sampling_rate, how.hop_length, how.fft_size) == (RATE, 80, 200)


@pytest.mark.slow
def test_a_text_is_answered(t5, capsys):
    capsys.readouterr()
    options = ["--prompt-tokens", "9", "--max-new-tokens", "6"]
    assert main(["generate", str(t5), "--prompt", "a source", *options]) == 0
    captured = capsys.readouterr()
    lines = [line.partition(":")[0] for line in captured.err.splitlines()]
    assert lines == ["encode", "prefill", "decode"]
    generator = Generator.load(t5)
    generator.encode(list(b"a source"))
    tokens = list(generator.generate([3, 9], lambda logits: int(logits.argmax()), limit=6))
    assert captured.out == bytes(tokens).decode(errors="replace") + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--audio", "a.wav"], "takes texts: got --audio, expected --prompt TEXT"),
        (["--prompt", "x" * 13], "too long: got 13 tokens, expected at most 12"),
        (["--prompt", ""], "there is no token"),
        (["--prompt", "x", "--prompt-tokens", "256"], "not in the model's vocabulary: got 256"),
        (["--prompt", "x", "--max-new-tokens", "25"], "a prompt of 1 and 25 more"),
        (["--prompt", "x", "--prompt-cache", "a"], "has no prompt to keep: got --prompt-cache a"),
    ],
)
def test_invalid_texts_are_one_line(t5, options, message, capsys):
    assert main(["generate", str(t5), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_invalid_recordings_are_one_line(whisper, tmp_path, capsys):
    cases = {
        "none.wav": "no such recording",
        str(write(tmp_path / "slow.wav", noise(99), rate=8000)): "got 8000, expected 16000",
        str(write(tmp_path / "long.wav", noise(8001))): "too long: got 0.50 s, expected at most",
    }
    capsys.readouterr()
    for path, message in cases.items():
        assert main(["generate", str(whisper[1]), "--audio", path]) == 1
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
    assert main(["generate", str(whisper[1]), "--prompt", "text"]) == 1
    assert "takes recordings: got --prompt, expected --audio" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--prompt", "x", "--audio", "a.wav"]])
def test_a_prompt_and_a_recording_exclude_each_other(given, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "model.pte", *given])
    assert exit_.value.code == 2
    assert "--audio" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (T5, ["--cache", "state"], "share no state on a device: got --cache state"),
        (WHISPER, ["--source-length", "9"], "takes spectrograms, whose length its config"),
        (WHISPER, ["--context", "81"], "got --context 81, expected at most 80"),
        (T5, ["--source-length", "1"], "the source is too short: got 1"),
        (T5, ["--quantize", "int4", "--group-size", "5"], "groups of weights do not divide"),
        ({**T5, "decoder_start_token_id": None}, [], "does not say which token begins an answer"),
        ({**WHISPER, "model_type": "llama"}, ["--source-length", "9"], "the model has no encoder"),
        (MOONSHINE, ["--layout", "standard"], "takes spectrograms of recordings: got a model that"),
        (MOONSHINE, ["--logits", "all"], "a model with an encoder returns the logits of the last"),
    ],
)
def test_invalid_export_options_are_refused(config, options, message, tmp_path, capsys):
    path, output = tmp_path / "config.json", tmp_path / "model.pte"
    path.write_text(json.dumps(config))
    assert export(["--random", str(path)], output, *options) == 1
    assert message in capsys.readouterr().err
    assert leftovers(tmp_path) == {"config.json"}


@pytest.mark.slow
def test_equal_models_give_equal_files(t5, tmp_path):
    again = tmp_path / "again.pte"
    source = ["--random", str(t5.with_name("t5.json"))]
    assert export(source, again, *QUICK, "--source-length", "12") == 0
    assert again.read_bytes() == t5.read_bytes()
