"""``coreml-delegate export-speech`` and ``transcribe``: files, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llm.test_audio import write
from llm.test_speech import BINS, BLANK, RATE, TRANSDUCER, make, recording
from support.command import leftovers
from support.text_tokenizer import save_tokenizer, text_of

from coreml_delegate.llm import speech
from coreml_delegate.llm.transcriber import Transcriber
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.commands import export_speech


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TRANSDUCER, "model_type": "parakeet_tdt"}))
    return path


def wav(path: Path, rate: int = RATE) -> Path:
    return write(path, np.round(recording(RATE) * 2**14), rate=rate)


def test_the_command_has_the_default_length():
    assert export_speech.SECONDS == speech.SECONDS


def test_a_recording_becomes_text(tmp_path, capsys):
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "model.pte"
    make("tdt").save_pretrained(checkpoint)
    save_tokenizer(checkpoint / "tokenizer.json", BLANK)
    (checkpoint / "preprocessor_config.json").write_text(json.dumps({"feature_size": BINS}))
    capsys.readouterr()  # the progress of save_pretrained
    command = ["export-speech", str(checkpoint), "-o", str(output), "--seconds", "1", "--json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert (document["kind"], document["frames"]) == ("tdt", 100)
    assert document["bytes"] == output.stat().st_size
    on_the_cpu = {name: method["on_the_cpu"] for name, method in document["methods"].items()}
    assert "aten.pad.default" in on_the_cpu["preprocessor"]
    assert "aten.lt.Tensor" in on_the_cpu["encoder"]
    assert (on_the_cpu["decoder_step"], on_the_cpu["joint"]) == ([], [])

    spoken = wav(tmp_path / "speech.wav")
    assert main(["transcribe", str(output), str(spoken), "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err.startswith("1.00 s in ")
    samples = np.round(recording(RATE) * 2**14).astype(np.float32) / 2**15
    tokens = Transcriber.load(output)(samples)
    assert answer["text"] == text_of([token.number for token in tokens])
    assert answer["tokens"] == [{"token": t.number, "start": t.start} for t in tokens]
    assert len(tokens) > 2
    assert main(["transcribe", str(output), str(spoken)]) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"

    slow = wav(tmp_path / "slow.wav", rate=8000)
    assert main(["transcribe", str(output), str(slow)]) == 1
    assert "number of samples a second: got 8000, expected 16000" in capsys.readouterr().err
    long = write(tmp_path / "long.wav", np.zeros(RATE + 1))
    assert main(["transcribe", str(output), str(long)]) == 1
    error = capsys.readouterr().err
    assert "got 1.00 s, expected one dimension, at most 1.00 s. Cut a longer recording" in error


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "whisper"}, [], "got model_type 'whisper', expected parakeet_ctc, parake"),
        ({"durations": [1, 2]}, [], "durations that are not supported: got [1, 2], expected [0, 1"),
        ({}, ["--seconds", "51"], "recordings of this length: got 51 s, expected 0.08 to 50 s"),
        ({}, ["--quantize", "gptq-4"], "unknown quantization mode"),
    ],
)
def test_bad_input_is_one_line(config, changes, options, message, tmp_path, capsys):
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    output = tmp_path / "model.pte"
    assert main(["export-speech", "--random", str(config), "-o", str(output), *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert leftovers(tmp_path) == {"config.json"}


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "long"])
def test_a_length_is_a_number_above_0(seconds, config, capsys):
    with pytest.raises(SystemExit):
        main(["export-speech", "--random", str(config), "-o", "m.pte", "--seconds", seconds])
    assert "--seconds: " in capsys.readouterr().err
