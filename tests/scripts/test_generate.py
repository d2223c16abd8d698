"""``coreml-delegate generate``: forms of the text, proposals, and files of caches."""

from __future__ import annotations

import json

import pytest
from support.checkpoints import CONFIG

from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("checkpoints")

BYTES = {**CONFIG, "model_type": "llama", "vocab_size": 256, "num_hidden_layers": 1}
BYTES |= {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 96}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("generate")


def export(folder, name: str, *options: str):
    config, path = folder / "config.json", folder / name
    config.write_text(json.dumps(BYTES))
    command = ["export-llm", "--random", str(config), "-o", str(path), "--context", "96"]
    assert main([*command, *options]) == 0
    return path


@pytest.fixture(scope="module")
def program(folder):
    return export(folder, "all.pte", "--logits", "all")


def generate(program, *options: str) -> int:
    return main(["generate", str(program), "--prompt", "abcabcabcabcabc", *options])


def document(capsys, program, *options: str):
    capsys.readouterr()
    assert generate(program, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--seed", "4"]])
def test_a_text_follows_a_schema(program, folder, options, capsys):
    schema = folder / "person.json"
    schema.write_text(json.dumps(SCHEMA))
    assert generate(program, "--json-schema", str(schema), *options) == 0
    person = json.loads(capsys.readouterr().out)
    assert sorted(person) == ["age", "name"]
    assert len(person["name"]) <= 5
    assert 0 <= person["age"] <= 120
    result = document(capsys, program, "--json-schema", str(schema), "--logprobs", "1", *options)
    assert json.loads(result["text"]) == person
    assert result["ending"] == "stop"
    assert all(entry["logprob"] <= 0 for entry in result["logprobs"])


def test_other_forms_of_a_text(program, folder, capsys):
    assert document(capsys, program, "--regex", "(ab|cd){3}x")["text"][-1] == "x"
    grammar = folder / "answer.lark"
    grammar.write_text('start: "yes" | "no"')
    assert document(capsys, program, "--lark", str(grammar))["text"] in ("yes", "no")
    assert document(capsys, program, "--json-object")["text"].startswith('{"')


def test_a_text_that_is_cut_off_is_a_warning(program, capsys):
    assert generate(program, "--regex", "[ab]{30}", "--max-new-tokens", "4") == 0
    assert "warning: the text is cut off, so it may not have the form" in capsys.readouterr().err


def test_proposals_change_no_token(program, capsys):
    plain = document(capsys, program)
    assert "speculation" not in plain
    for options in (["--prompt-lookup"], ["--draft", str(program), "--draft-tokens", "3"]):
        result = document(capsys, program, *options)
        assert (result["tokens"], result["ending"]) == (plain["tokens"], "context")
        statistics = result["speculation"]
        assert statistics["calls"] + statistics["accepted"] == len(plain["tokens"]) - 1
        assert 0 < statistics["accepted"] <= statistics["proposed"]
    assert generate(program, "--draft", str(program)) == 0
    assert "tokens a call" in capsys.readouterr().err


def test_a_file_keeps_the_caches_of_a_prompt(program, folder, capsys):
    cache = folder / "prompt.cache"
    options = ["--prompt-cache", str(cache), "--max-new-tokens", "6"]
    first, second = (document(capsys, program, *options) for _ in range(2))
    assert first["text"] == second["text"]
    assert (first["prompt_cache"], second["prompt_cache"]) == ({"tokens": 0}, {"tokens": 14})
    assert second["prefill"]["tokens"] == 0
    cache.write_bytes(cache.read_bytes()[:-8])
    assert generate(program, *options) == 1
    assert f"{cache} is no prompt cache that can be read" in capsys.readouterr().err


def test_the_file_of_another_program_is_replaced(program, folder, capsys):
    cache = folder / "other.cache"
    options = ["--prompt-cache", str(cache), "--max-new-tokens", "6"]
    last = export(folder, "last.pte", "--seed", "8")
    expected = document(capsys, last, "--max-new-tokens", "6")["tokens"]
    assert generate(program, *options) == 0
    capsys.readouterr()
    assert generate(last, *options) == 0
    assert "is of another program or adapter, and is not used" in capsys.readouterr().err
    assert document(capsys, last, *options)["tokens"] == expected
    assert generate(last, "--prompt-lookup") == 1
    assert "Export it with --logits all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json-object --stop x", "--stop does not go with --json-object"),
        ("--json-object --runner executorch", "--json-object does not go with --runner executorch"),
        ("--prompt-lookup --runner executorch", "--prompt-lookup does not go with --runner"),
        ("--prompt-cache a --runner executorch", "--prompt-cache does not go with --runner"),
        ("--draft-tokens 3", "--draft-tokens needs --draft"),
        ("--prompt-cache a --image b.png", "--image does not go with --prompt-cache"),
        ("--json-object --regex a", "not allowed with argument"),
        ("--draft a.pte --prompt-lookup", "not allowed with argument"),
    ],
)
def test_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        generate("missing.pte", *options.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--regex (", "the regular expression cannot be followed"),
        ("--json-schema missing.json", "No such file"),
        ("--lark missing.lark", "No such file"),
    ],
)
def test_forms_are_read_before_the_program(options, message, capsys):
    assert generate("missing.pte", *options.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--layout", "methods"],
        ["--cache", "io"],
        ["--sample-in-model", "argmax"],
        ["--for", "neural-engine"],
    ],
)
def test_forms_of_a_program_without_all_logits_are_refused(folder, options, capsys):
    config = folder / "refused.json"
    config.write_text(json.dumps(BYTES))
    command = ["export-llm", "--random", str(config), "-o", str(folder / "refused.pte")]
    assert main([*command, "--logits", "all", *options]) == 1
    assert "--logits all" in capsys.readouterr().err
