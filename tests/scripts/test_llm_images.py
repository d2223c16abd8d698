"""``export-llm`` and ``generate`` of models that read images: files, output and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from support.command import leftovers
from support.text_only_models import tiny_text_only_model
from support.vision_families import (
    IMAGE,
    SIDE,
    configuration,
    logits_of,
    tiny_vision_model,
    whole_text,
)

from coreml_delegate.errors import InputError
from coreml_delegate.llm.generator import Generator
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("checkpoints")

BYTES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
LIMIT = 12


@pytest.fixture(scope="module", autouse=True)
def _torchao():
    # It is logged about while it is imported, which is no output of the command.
    import torchao.quantization  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def photo(folder):
    path = folder / "china.jpg"
    Image.fromarray(load_sample_image("china.jpg")).save(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(folder):
    """A SmolVLM of one layer each, whose tokens are bytes, with a processor of its own."""
    path = folder / "checkpoint"
    tiny_vision_model("smolvlm", layers=1, **BYTES).save_pretrained(path)
    transformers().SmolVLMImageProcessor(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def program(folder, checkpoint):
    """The checkpoint, exported by the command."""
    path = folder / "model.pte"
    options = ["--precision", "float32", "--prefill-chunk", "8", "--context", "64"]
    assert main(["export-llm", str(checkpoint), "-o", str(path), *options]) == 0
    return path


def generate(program: Path, prompt: str, *options: object) -> int:
    return main(["generate", str(program), "--prompt", prompt, *map(str, options)])


def test_a_photo_and_a_text_give_the_tokens_of_transformers(program, checkpoint, photo, capsys):
    assert (
        generate(program, "a<image>b", "--image", photo, "--max-new-tokens", LIMIT, "--json") == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["prefill"]["tokens"] == 6
    processor = transformers().AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    given = processor(images=Image.open(photo), do_image_splitting=False, return_tensors="pt")[
        "pixel_values"
    ]
    model = tiny_vision_model("smolvlm", layers=1, **BYTES)
    tokens = [97, IMAGE, 98]
    for token in document["tokens"]:
        assert token == int(logits_of(model, "smolvlm", tokens, given[0])[-1].argmax())
        tokens.append(token)
    assert len(document["tokens"]) == LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "described"),
    [
        ("gemma3", [], "56 x 56 pixels in 16 positions"),
        ("qwen2_5_vl", ["--image-size", "56x84"], "56 x 84 pixels in 6 positions"),
    ],
)
def test_images_that_the_language_model_has_to_know_of(
    name, options, described, photo, tmp_path, capsys
):
    """With an image processor that gives the photo the size that the model was exported for."""
    library, output = transformers(), tmp_path / "model.pte"
    processor = {
        "gemma3": library.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        "qwen2_5_vl": library.Qwen2VLImageProcessorPil(
            size={"shortest_edge": SIDE**2, "longest_edge": 70**2}
        ),
    }[name]
    model = tiny_vision_model(name, **BYTES)
    model.save_pretrained(tmp_path / "checkpoint")
    processor.save_pretrained(tmp_path / "checkpoint")
    command = ["export-llm", str(tmp_path / "checkpoint"), "-o", str(output)]
    assert main([*command, "--precision", "float32", "--context", "64", *options]) == 0
    out = capsys.readouterr().out
    assert described in out
    assert re.search(rf"chunk +{max(8, int(described.split()[-2]))} tokens a call", out)
    assert " in 2 layers" in out
    limit = ["--max-new-tokens", LIMIT, "--json"]
    assert generate(output, "a<image>b", "--image", photo, *limit) == 0
    given = processor(images=Image.open(photo), return_tensors="pt")
    given.pop("num_crops", None)
    tokens = [97, IMAGE, 98]
    for token in json.loads(capsys.readouterr().out)["tokens"]:
        text = whole_text(name, tokens, positions=int(described.split()[-2]))
        kinds = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
        with torch.no_grad():
            logits = model(input_ids=text, **given, **{kinds: (text == IMAGE).long()}).logits
        assert token == int(logits[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 3 + LIMIT


def test_a_size_of_images_needs_images(folder, capsys):
    path = folder / "mistral.json"
    path.write_text(json.dumps(tiny_text_only_model("mistral3").config.to_dict()))
    command = ["export-llm", "--random", str(path), "-o", str(folder / "none.pte")]
    for options in (["--image-size", "56x56"], ["--image-size", "56x56", "--text-only"]):
        assert main([*command, *options]) == 1
        assert "the exported model takes no images: got --image-size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--image-size", "56"])
    assert "'56' is not a height and width such as 448x448" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_without_an_image_is_continued(program, capsys):
    assert generate(program, "ab", "--max-new-tokens", "4", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["prefill"]["tokens"], len(document["tokens"])) == (2, 4)


@pytest.mark.slow
def test_the_tokenizer_says_what_an_image_is(program, photo, tmp_path, capsys):
    """Ids are those of the bytes, so the answer is too."""
    words = {"a": 97, "b": 98, "<image>": IMAGE}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = []
    for prompt, options in (
        ("a<image>b", []),
        ("a <image> b", ["--tokenizer", tmp_path / "tokenizer.json"]),
    ):
        options += ["--image", photo, "--max-new-tokens", LIMIT, "--json"]
        assert generate(program, prompt, *options) == 0
        made.append(json.loads(capsys.readouterr().out)["tokens"])
    assert made[0] == made[1]


@pytest.mark.slow
def test_other_images_give_other_logits(program):
    generator = Generator.load(program)
    pixels = torch.randn(3, 1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    logits = []
    for order in ([0, 1], [1, 0], [0, 2]):
        generator.reset()
        logits.append(generator.feed([97, IMAGE, 98, IMAGE, 99], [pixels[i] for i in order]))
    assert generator.position == 3 + 2 * 4
    assert not any(torch.equal(logits[a], logits[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    with pytest.raises(InputError, match=r"got \[1, 3, 28, 28\], expected \[1, 3, 56, 56\]"):
        generator.feed([IMAGE], [torch.zeros(1, 3, 28, 28)])
    assert generator.position == 11
    generator.feed([IMAGE])  # as one that was generated, which has no image
    assert generator.position == 12


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("a<image><image>b", 1, "got 2 times token 90, and 1 image. Put the token into the prompt"),
        ("ab", 1, "got 0 times token 90, and 1 image"),
        ("a<image>", 0, "got 1 times token 90, and 0 images"),
        ("<image>" * 17, 17, "the context of 64 tokens is too short: got 68 more"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(
    program, photo, prompt, images, message, capsys
):
    assert generate(program, prompt, *["--image", photo] * images) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_a_chunk_of_executorchs_runner_has_a_whole_image(photo, tmp_path, capsys):
    config, output = tmp_path / "llava.json", tmp_path / "model.pte"
    config.write_text(json.dumps(configuration("llava", layers=1, **BYTES)))
    command = ["export-llm", "--random", str(config), "-o", str(output)]
    assert main(command) == 0
    assert re.search(r"chunk +16 tokens a call", capsys.readouterr().out)
    prompt = ["a<image>b", "--image", photo, "--max-new-tokens", LIMIT, "--json"]
    documents = []
    for runner in ("own", "executorch"):
        assert generate(output, *prompt, "--runner", runner) == 0
        documents.append(json.loads(capsys.readouterr().out))
    own, executorch = documents
    assert executorch["prefill"]["tokens"] == own["prefill"]["tokens"] == 18
    printable = [chr(token) for token in own["tokens"] if 32 <= token < 127]
    assert executorch["text"] == "".join(printable)
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "model.tokenizer.json"))
    reader.post_processor = tokenizers.processors.TemplateProcessing("! $A", None, [("!", 33)])
    reader.save(str(tmp_path / "tokenizer.json"))
    for prompt, count in (("<image>b", 18), ("a<image>b", 19)):
        words = [prompt, "--image", photo, "--max-new-tokens", LIMIT, "--json"]
        words += ["--tokenizer", tmp_path / "tokenizer.json"]
        for runner in ("own", "executorch"):
            assert generate(output, *words, "--runner", runner) == 0
            assert json.loads(capsys.readouterr().out)["prefill"]["tokens"] == count
    assert main([*command, "--force", "--prefill-chunk", "8"]) == 1
    assert "got 8 tokens, expected at least 16" in capsys.readouterr().err
    few = [*command, "--force", "--prefill-chunk", "8", "--layout", "methods"]
    assert main(few) == 0
    assert re.search(r"chunk +8 tokens a call", capsys.readouterr().out)


@pytest.mark.slow
def test_files_that_are_no_images_are_refused(program, capsys):
    assert generate(program, "<image>", "--image", program) == 1
    assert "cannot read the image" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_text_takes_no_images(folder, photo, capsys):
    values = configuration("llava", layers=1, **BYTES)["text_config"]
    (folder / "text.json").write_text(json.dumps(values))
    options = ["--random", str(folder / "text.json"), "-o", str(folder / "text.pte")]
    assert main(["export-llm", *options, "--prefill-chunk", "8"]) == 0
    capsys.readouterr()
    assert generate(folder / "text.pte", "ab", "--image", photo) == 1
    assert "the model takes no images: got 1 image. Export a model" in capsys.readouterr().err


def test_a_checkpoint_whose_images_are_refused_generates_text(tmp_path, capsys):
    """The tower has layers that no group of weights divides."""
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "model.pte"
    model = tiny_text_only_model("mistral3", num_hidden_layers=1, **BYTES)
    model.save_pretrained(checkpoint)
    command = ["export-llm", str(checkpoint), "-o", str(output), "--precision", "float32"]
    few_bits = ["--quantize", "int4", "--group-size", "16", "--embedding-quantize", "int8"]
    assert main([*command, *few_bits]) == 0
    warning = "warning: images are left out: mistral3 has tokens between the rows of an image"
    assert warning in capsys.readouterr().err
    few = output.stat().st_size
    cache = ["--cache", "buffer", "--force"]
    assert main([*command, "--text-only", "--json", *cache]) == 0
    captured = capsys.readouterr()
    assert "images" not in captured.err
    assert json.loads(captured.out)["layout"]["get_max_context_len"]
    assert few < output.stat().st_size < sum(p.numel() for p in model.parameters()) * 4
    assert generate(output, "ab", "--max-new-tokens", LIMIT, "--json") == 0
    tokens = [*b"ab"]
    for token in json.loads(capsys.readouterr().out)["tokens"]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        assert token == int(logits[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 2 + LIMIT


@pytest.mark.slow
def test_equal_options_give_equal_files(folder, program, checkpoint):
    options = ["--precision", "float32", "--prefill-chunk", "8", "--context", "64"]
    again = folder / "again.pte"
    assert main(["export-llm", str(checkpoint), "-o", str(again), *options]) == 0
    assert again.read_bytes() == program.read_bytes()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "paligemma"}, [], "which has attention in both directions"),
        ({}, ["--context", "18"], "no room for an image and a text: got a context of 18 tokens"),
        ({"vision_feature_layer": 7}, [], "does not compute with an image and a text"),
        ({"vision_config": {"model_type": "siglip2_vision_model"}}, [], "images of any size"),
    ],
)
def test_configurations_that_do_not_work_are_refused(changes, options, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**configuration("llava", layers=1), **changes}))
    output = tmp_path / "model.pte"
    assert main(["export-llm", "--random", str(path), "-o", str(output), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert leftovers(tmp_path) == {"config.json"}


def test_a_checkpoint_must_say_how_images_are_prepared(tmp_path, capsys):
    tiny_vision_model("llava", layers=1).save_pretrained(tmp_path / "checkpoint")
    output = tmp_path / "model.pte"
    assert main(["export-llm", str(tmp_path / "checkpoint"), "-o", str(output)]) == 1
    captured = capsys.readouterr()
    assert "Copy the preprocessor_config.json of the model into the folder" in captured.err
    assert captured.err.count("\n") == 1
    assert not output.exists()
