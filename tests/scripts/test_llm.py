"""``coreml-delegate export-llm`` and ``generate``: files, output and errors."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import CONFIG, save, tiny_model
from support.command import leftovers, start, tiny_pte
from support.gguf_files import TOKENS, write_gguf
from support.text_tokenizer import save_tokenizer
from support.tolerances import logits_bounds
from tokenizers import Tokenizer

from coreml_delegate.errors import InputError
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts import arguments
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.commands import export_llm

pytestmark = pytest.mark.xdist_group("checkpoints")


@pytest.fixture(scope="module", autouse=True)
def _torchao():
    # It is logged about while it is imported, which is no output of the command.
    import torchao.quantization  # noqa: F401


BYTES = {**CONFIG, "model_type": "llama", "vocab_size": 256, "num_hidden_layers": 1}
BYTES |= {"bos_token_id": None, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(BYTES))
    return path


@pytest.fixture(scope="module")
def program(folder, config):
    """A model with random weights, exported by the command."""
    path = folder / "model.pte"
    options = ["--prefill-chunk", "8", "--context", "32", "--seed", "3", "--precision", "float32"]
    assert main(["export-llm", "--random", str(config), "-o", str(path), *options]) == 0
    return path


def printed(text: str) -> str:
    """The characters that ExecuTorch's runner prints: no control characters."""
    return "".join(c for c in text if c.isprintable() or c.isspace())


def generate(program: Path, *options: str) -> int:
    return main(["generate", str(program), "--prompt", "ab", *options])


def test_cache_choices_equal_the_enum():
    assert set(export_llm.CACHES) == {kind.value for kind in CacheKind}
    assert arguments.PRECISIONS[0] == "float16"


def test_a_checkpoint_is_exported(folder, capsys):
    checkpoint, output = folder / "checkpoint", folder / "checkpoint.pte"
    model = save(checkpoint, "qwen3", num_hidden_layers=1, head_dim=8)
    arguments = ["--precision", "float32", "--prefill-chunk", "8", "--json"]
    assert main(["export-llm", str(checkpoint), "-o", str(output), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["bytes"] == output.stat().st_size
    assert document["parameters"] == sum(p.numel() for p in model.parameters())
    assert document["layout"]["get_eos_ids"] == [2]
    (counts,) = document["methods"].values()
    assert counts["partitions"] == 1
    assert 0 < counts["operations"] - counts["delegated"] < 10
    tokens = [5, 7, 11, 13]
    generator = Generator.load(output)
    expected = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)
    stops = generator.layout.eos
    made = list(generator.generate(tokens, lambda logits: int(logits.argmax()), limit=8))
    theirs = itertools.takewhile(lambda t: t not in stops, expected[0, len(tokens) :].tolist())
    assert made == list(theirs)


def test_the_tokenizer_is_copied_and_executorchs_runner_writes_the_same_text(folder, capsys):
    checkpoint, output = folder / "characters", folder / "characters.pte"
    save(checkpoint, "llama", bos_token_id=None, eos_token_id=None)
    source = save_tokenizer(checkpoint / "tokenizer.json", CONFIG["vocab_size"])
    copy = folder / "characters.tokenizer.json"
    copy.write_text("")
    export = ["export-llm", str(checkpoint), "-o", str(output), "--precision", "float32"]
    assert main(export) == 1
    assert f"output exists: got {copy}" in capsys.readouterr().err
    assert not output.exists()
    assert main([*export, "--force"]) == 0
    assert copy.read_bytes() == source.read_bytes()
    capsys.readouterr()

    def text(*options: str) -> str:
        assert generate(output, "--max-new-tokens", "9", "--json", *options) == 0
        return json.loads(capsys.readouterr().out)["text"]

    assert text("--runner", "executorch") == printed(text()) != ""


def test_random_weights_get_a_tokenizer_of_bytes_which_executorchs_runner_reads(tmp_path, capsys):
    config, output = tmp_path / "config.json", tmp_path / "model.pte"
    config.write_text(json.dumps({**BYTES, "vocab_size": 1000, "bos_token_id": 999}))
    export = ["export-llm", "--random", str(config), "-o", str(output), "--precision", "float32"]
    assert main(export) == 0
    assert leftovers(tmp_path) == {"config.json", "model.pte", "model.tokenizer.json"}
    capsys.readouterr()
    texts = set()
    for runner in ([], ["--runner", "executorch"]):
        assert generate(output, "--max-new-tokens", "9", "--json", *runner) == 0
        texts.add(printed(json.loads(capsys.readouterr().out)["text"]))
    (text,) = texts
    assert text
    assert main(export) == 1
    assert "output exists" in capsys.readouterr().err
    # A configuration in the folder of its checkpoint has a tokenizer.
    own = save_tokenizer(tmp_path / "tokenizer.json", CONFIG["vocab_size"])
    assert main([*export, "--force"]) == 0
    assert (tmp_path / "model.tokenizer.json").read_bytes() == own.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--layout", "standard", "--sample-in-model", "argmax"],
            "Export it with --layout methods",
        ),
        (
            ["--layout", "standard", "--cache", "io"],
            "got io in the layout standard, expected state",
        ),
        (["--layout", "methods", "--cache", "buffer"], "got buffer in the layout methods"),
    ],
)
def test_layouts_that_do_not_exist_are_one_line(config, folder, options, message, capsys):
    output = folder / "refused.pte"
    assert main(["export-llm", "--random", str(config), "-o", str(output), *options]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "tokenizer", "message"),
    [
        ("--quantize gptq-4", True, "gptq-4 needs a text. Pass --calibration FILE.txt"),
        ("--calibration TEXT", True, "nothing to calibrate: got --quantize none"),
        ("--budget 9", True, "--budget needs a text. Pass --calibration FILE.txt"),
        ("--budget 9 --calibration TEXT --quantize gptq-4", True, "chooses the mode of each"),
        ("--budget 9 --calibration TEXT --quantize int8", True, "a mode with a finer one"),
        ("--budget 0.5 --calibration TEXT --group-size 16", True, "do not keep the perplexity"),
        ("--quantize skm-4 --calibration TEXT", False, "got no tokenizer.json in"),
        ("--quantize gptq-4 --calibration TEXT --group-size 16", True, "got 5 tokens, expected 16"),
        ("--quantize gptq-4 --calibration BYTES", True, "not a text in UTF-8"),
        ("--quantize gptq-4 --calibration MISSING", True, "No such file"),
        (
            "--quantize gptq-4 --calibration TEXT --deployment-target iOS17",
            True,
            "--deployment-target must be iOS18 or higher for gptq-4",
        ),
    ],
)
def test_calibration_without_its_parts_is_one_line(folder, options, tokenizer, message, capsys):
    checkpoint, output = folder / "calibrated", folder / "calibrated.pte"
    save(checkpoint, "llama", bos_token_id=None, eos_token_id=None)
    (folder / "TEXT").write_text("a few")
    (folder / "BYTES").write_bytes(b"\xff\xfe")
    (checkpoint / "tokenizer.json").unlink(missing_ok=True)
    if tokenizer:
        save_tokenizer(checkpoint / "tokenizer.json", CONFIG["vocab_size"])
    named = [str(folder / text) if text.isupper() else text for text in options.split()]
    assert main(["export-llm", str(checkpoint), "-o", str(output), *named]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not output.exists()


def test_calibrated_weights_are_written(folder, capsys):
    checkpoint, output, text = folder / "text", folder / "text.pte", folder / "text.txt"
    save(checkpoint, "llama", num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    save_tokenizer(checkpoint / "tokenizer.json", CONFIG["vocab_size"])
    text.write_text("Some words to calibrate with. " * 8)
    options = ["--quantize", "gptq-4", "--calibration", str(text), "--group-size", "16"]
    assert main(["export-llm", str(checkpoint), "-o", str(output), *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["bytes"] == output.stat().st_size
    assert main(["inspect", str(output), "--weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # The seven layers of the block, and the head.
    assert sum("recorded_weight" in line and "uint4" in line for line in lines) == 8


def test_a_budget_is_kept(folder, capsys):
    checkpoint, output, text = folder / "budget", folder / "budget.pte", folder / "budget.txt"
    save(checkpoint, "llama", num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    save_tokenizer(checkpoint / "tokenizer.json", CONFIG["vocab_size"])
    text.write_text("Some words to calibrate with. " * 2)
    options = ["--budget", "1000", "--calibration", str(text), "--group-size", "16"]
    assert main(["export-llm", str(checkpoint), "-o", str(output), *options]) == 0
    assert "0 of 8 layers in more bits" in capsys.readouterr().err
    assert output.is_file()


def test_precision_auto_holds_its_target_or_writes_nothing(config, tmp_path, capsys):
    output = tmp_path / "model.pte"
    command = ["export-llm", "--random", str(config), "-o", str(output), "--precision", "auto"]
    assert main([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["methods"]["forward"]["precision"]
    assert plain["before_db"] == plain["after_db"] > 40
    assert not plain["islands"]
    target = plain["after_db"] + 2
    assert main([*command, "--json", "--force", "--min-sqnr", str(target)]) == 0
    report = json.loads(capsys.readouterr().out)["methods"]["forward"]["precision"]
    assert report["after_db"] >= target
    assert report["islands"]
    assert main([*command, "--min-sqnr", "300", "--force"]) == 0
    plain_text = f"{plain['before_db']:.1f} dB on the example inputs, below the target\n"
    assert plain_text in capsys.readouterr().out
    before = leftovers(tmp_path)
    command[command.index(str(output))] = str(tmp_path / "other.pte")
    assert main([*command, "--min-sqnr", "300"]) == 1
    assert "expected at least 300 dB" in capsys.readouterr().err
    assert leftovers(tmp_path) == before


def test_options_that_executorchs_runner_lacks_are_wrong_usage(program, tmp_path, capsys):
    for option in (["--top-k", "5"], ["--stop", "x"], ["--chat", "--tokenizer", "x"]):
        with pytest.raises(SystemExit):
            generate(program, "--runner", "executorch", *option)
        assert f"{option[0]} does not go with --runner executorch" in capsys.readouterr().err
    without_tokenizer = tmp_path / "model.pte"
    without_tokenizer.symlink_to(program)
    assert generate(without_tokenizer, "--runner", "executorch") == 1
    assert "ExecuTorch's runner needs the model's tokenizer" in capsys.readouterr().err


def test_text_on_stdout_and_pace_on_stderr(program, capsys):
    assert generate(program, "--max-new-tokens", "5") == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == ["prefill", "decode"]
    assert captured.err.count("tokens/s") == 2


def test_equal_seeds_give_equal_texts(program, capsys):
    def texts(seed: int) -> str:
        options = ["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--json"]
        assert generate(program, "--max-new-tokens", "12", "--seed", str(seed), *options) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["ending"], len(document["tokens"])) == ("limit", 12)
        assert document["prefill"]["tokens"] == 2
        return document["text"]

    assert texts(1) == texts(1) != texts(2)


def test_probabilities_are_written(program, capsys):
    options = ["--logprobs", "2", "--repetition-penalty", "1.5", "--json"]
    assert generate(program, "--max-new-tokens", "4", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["token"] for entry in document["logprobs"]] == document["tokens"]
    for entry in document["logprobs"]:
        (_, first), (_, second) = entry["most_probable"]
        assert first >= second
        assert entry["logprob"] <= first < 0
    with pytest.raises(SystemExit):
        generate(program, "--logprobs", "2")
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_a_full_context_is_a_warning(program, capsys):
    assert generate(program, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == "coreml-delegate: warning: the context of 32 tokens is full\n"
    document = json.loads(captured.out)
    assert (document["ending"], len(document["tokens"])) == ("context", 31)


def test_stop_tokens_and_texts_end_the_output(program, capsys):
    def made(*stop: str) -> dict:
        assert generate(program, "--max-new-tokens", "9", "--json", *stop) == 0
        return json.loads(capsys.readouterr().out)

    tokens = made()["tokens"]
    by_token = made("--stop", str(tokens[0]))
    assert (by_token["text"], by_token["tokens"], by_token["ending"]) == ("", [], "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "99"], "a prompt of 2 and 99 more, expected at most 32 more"),
        (["--temperature", "-1"], "temperature is out of range: got -1.0"),
        (["--tokenizer", "none.json"], "no such tokenizer: got none.json"),
        (["--prompt", ""], "there is no token. Give a prompt that is not empty"),
        (["--prompt", "x" * 33], "the context of 32 tokens is too short: got 33 more"),
    ],
)
def test_invalid_prompts_and_options_are_one_line(program, options, message, capsys):
    assert generate(program, *options) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("coreml-delegate: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--audio", "a.wav"], "takes texts: got --audio, expected --prompt TEXT"),
        (["--prompt", "x", "--prompt-tokens", "1"], "--prompt-tokens is for encoder-decoder"),
    ],
)
def test_a_decoder_takes_no_source(program, options, message, capsys):
    assert main(["generate", str(program), *options]) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="the model has no encoder"):
        Generator.load(program).encode([1])


def test_programs_without_a_language_model_are_refused(folder, capsys):
    (folder / "tiny.pte").write_bytes(tiny_pte())
    assert generate(folder / "tiny.pte") == 1
    assert (
        "is not a language model for ExecuTorch's runners or of this package"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "recurrent_gemma"}, [], "does not compute with a cache of keys and values"),
        ({}, ["--context", "65"], "got --context 65, expected at most 64"),
        ({}, ["--quantize", "int4", "--group-size", "5"], "groups of weights do not divide"),
        ({}, ["--quantize", "int5"], "unknown quantization mode: got 'int5'"),
        ({}, ["--quantize", "palettize-4"], "palettize-4 does not quantize modules of PyTorch"),
        ({}, ["--quantize", "int8", "--group-size", "16"], "--group-size belongs to int4"),
        ({}, ["--quantize-config", "none.json"], "cannot read none.json"),
        (
            {},
            ["--embedding-quantize", "codebook-4", "--deployment-target", "iOS17"],
            "--deployment-target must be iOS18 or higher for codebook-4",
        ),
    ],
)
def test_invalid_export_options_are_refused(changes, options, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BYTES, **changes}))
    output = tmp_path / "model.pte"
    assert main(["export-llm", "--random", str(path), "-o", str(output), *options]) == 1
    assert message in capsys.readouterr().err
    assert leftovers(tmp_path) == {"config.json"}


@pytest.mark.parametrize("sources", [[], ["folder", "--random", "config.json"]])
def test_checkpoint_and_random_exclude_each_other(sources, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["export-llm", *sources, "-o", "model.pte"])
    assert exit_.value.code == 2
    assert "exactly one is required" in capsys.readouterr().err


def test_a_missing_checkpoint_is_an_error(capsys):
    assert main(["export-llm", "nowhere", "-o", "model.pte"]) == 1
    assert "no such checkpoint: got nowhere" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_ends_generation(folder, config):
    """A long context, so that the text is certainly not done."""
    path = folder / "long.pte"
    config.with_name("long.json").write_text(
        json.dumps({**BYTES, "max_position_embeddings": 10**6})
    )
    options = ["--random", str(config.with_name("long.json")), "--context", "100000"]
    assert main(["export-llm", *options, "--prefill-chunk", "2", "-o", str(path)]) == 0
    process = start("generate", path, "--prompt", "a")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "coreml-delegate: error: interrupted\n"


def test_a_gguf_file_is_exported_with_its_tokenizer(tmp_path, capsys):
    checkpoint, output = tmp_path / "llama.gguf", tmp_path / "model.pte"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = tiny_model("llama", vocab_size=TOKENS, **sizes)
    write_gguf(checkpoint, model, "Q4_0")
    options = ["--precision", "float32", "--json"]
    assert main(["export-llm", str(checkpoint), "-o", str(output), *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["layout"]["get_eos_ids"] == [2]
    assert leftovers(tmp_path) == {"llama.gguf", "model.pte", "model.tokenizer.json"}
    tokens = Tokenizer.from_file(str(tmp_path / "model.tokenizer.json")).encode("He sees").ids
    reference = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=checkpoint.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    capsys.readouterr()
    atol, rtol = logits_bounds(expected)
    actual = Generator.load(output, engine="openvino").feed(tokens)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    assert output.stat().st_size < 3 * sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_the_form_for_the_neural_engine_says_what_becomes_of_quantized_weights(tmp_path, capsys):
    checkpoint, output = tmp_path / "llama.gguf", tmp_path / "model.pte"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    write_gguf(checkpoint, tiny_model("llama", vocab_size=TOKENS, **sizes), "Q4_0")
    command = ["export-llm", str(checkpoint), "-o", str(output), "--for", "neural-engine"]
    assert main(command) == 0
    assert "9 of 9 quantized weights are used in floating point" in capsys.readouterr().err


def test_a_malformed_gguf_file_is_one_error(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML")
    assert main(["export-llm", str(path), "-o", str(tmp_path / "model.pte")]) == 1
    assert "transformers cannot read" in capsys.readouterr().err
    assert leftovers(tmp_path) == {"model.gguf"}
