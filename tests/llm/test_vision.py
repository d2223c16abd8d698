"""Models that read images: the same logits and tokens as transformers itself, or one error."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace

import pytest
import torch
from llm import vision_table
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_image
from support.lowering import fp32_specs
from support.quantization import few_bits
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import ATOL_RTOL, SQNR_FP16, logits_bounds, sqnr_db
from support.vision_families import (
    FAMILIES,
    IMAGE,
    SIDE,
    VARIANTS,
    configuration,
    logits_of,
    tiny_vision_model,
    whole_text,
)

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import InputError, LoweringError, OptionError
from coreml_delegate.llm import executorch_runner, patch_towers, vision
from coreml_delegate.llm.checkpoint import load_decoder, read_config
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.images import Fit, ImageInput, Preparation
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.tokenizer import load_tokenizer
from coreml_delegate.llm.vision import VisionDecoder, image_input
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.targets import Opset

CONTEXT, STEPS = 96, 32
PROMPT = [5, IMAGE, 7, 11, IMAGE, 13]
ENGINES = ("openvino", "reference")


def images_of(name: str) -> torch.Tensor:
    """Two images, [2, 3, H, W]."""
    size = (FAMILIES | VARIANTS)[name].size
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def pixels_of(name: str) -> list[torch.Tensor]:
    return list(images_of(name)[:, None])


def most_probable(logits: torch.Tensor) -> int:
    return int(logits.argmax())


@functools.cache
def expected(name: str) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, computed on whole texts, and the logits behind each."""
    model, made = tiny_vision_model(name), []
    for _ in range(STEPS):
        made.append(most_probable(logits_of(model, name, PROMPT + made, images_of(name))[-1]))
    return made, logits_of(model, name, PROMPT + made, images_of(name))[-STEPS - 1 :]


def decoder_of(name: str) -> VisionDecoder:
    family = (FAMILIES | VARIANTS)[name]
    size = family.size if family.chooses_size else None
    return VisionDecoder(tiny_vision_model(name), context=CONTEXT, image_size=size)


def layout_of(
    decoder: VisionDecoder, cache: CacheKind = CacheKind.IO, *, name: str = "llava"
) -> Layout:
    image = image_input(decoder, Preparation(decoder.size))
    replaced = decoder.replaced if cache is CacheKind.IO else ()
    chunk = (FAMILIES | VARIANTS)[name].chunk
    return Layout(decoder.vocabulary, CONTEXT, chunk, cache, image=image, replaced=replaced)


def lowered(
    name: str,
    precision: Precision = Precision.FLOAT32,
    cache: CacheKind = CacheKind.IO,
    *,
    decoder: VisionDecoder | None = None,
) -> bytes:
    decoder = decoder or decoder_of(name)
    layout = layout_of(decoder, cache, name=name)
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_methods(decoder, layout), layout, partitioner).buffer
    assert [len(report.partitions) for report in partitioner.reports] == [1] * len(layout.methods)
    assert not any(report.undelegated for report in partitioner.reports)
    return program


def fed(generator: Generator, name: str, tokens: list[int]) -> torch.Tensor:
    """Logits behind the prompt with its images, and behind each token after it."""
    made = [generator.feed(PROMPT, pixels_of(name)), *(generator.feed([token]) for token in tokens)]
    return torch.stack(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    tokens, logits = expected(name)
    program = lowered(name)
    atol, rtol = logits_bounds(logits)
    for engine in ENGINES:
        generator = Generator.load(program, engine=engine)
        torch.testing.assert_close(fed(generator, name, tokens), logits, atol=atol, rtol=rtol)
        generator.reset()
        greedy = generator.generate(PROMPT, most_probable, limit=STEPS, images=pixels_of(name))
        assert list(greedy) == tokens
        assert generator.position == whole_text(name, PROMPT).shape[1] + STEPS - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llava", CacheKind.IO),
        ("smolvlm", CacheKind.STATE),
        ("internvl", CacheKind.IO),
        ("gemma3", CacheKind.STATE),
        ("qwen2_5_vl", CacheKind.STATE),
        ("qwen3_vl", CacheKind.IO),
    ],
)
def test_fp16_and_states_stay_close(name, cache):
    tokens, logits = expected(name)
    program = lowered(name, Precision.FLOAT16, cache)
    for engine in ENGINES:
        actual = fed(Generator.load(program, engine=engine), name, tokens)
        assert sqnr_db(logits.numpy(), actual.numpy()) > SQNR_FP16


@pytest.mark.slow
@pytest.mark.parametrize(("linear", "embedding"), [("int4", "int8"), ("int8", "none")])
def test_few_bits_are_for_the_language_model_alone(linear, embedding):
    """Tower and projector stay as they are: groups do not divide the layers of common towers."""
    decoder = decoder_of("smolvlm")
    quantize_weights(decoder, **few_bits(linear, embedding))
    generator = Generator.load(lowered("smolvlm", decoder=decoder), engine="reference")
    images, pixels = images_of("smolvlm"), pixels_of("smolvlm")
    with torch.no_grad():
        tokens = whole_text("smolvlm", PROMPT)
        rows = decoder.embed(tokens)
        seen = torch.cat([decoder.see(image)[0] for image in pixels])
        rows[0, tokens[0] == IMAGE] = seen
        logits = decoder.forward(rows)[0, -1]
        whole = tiny_vision_model("smolvlm").get_image_features(pixel_values=images[None])
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(seen, torch.cat(whole.pooler_output), atol=atol, rtol=rtol)
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(generator.feed(PROMPT, pixels), logits, atol=atol, rtol=rtol)
    kept = logits_of(tiny_vision_model("smolvlm"), "smolvlm", PROMPT, images)[-1]
    assert not torch.allclose(logits, kept, atol=10 * atol, rtol=10 * rtol)


@pytest.mark.slow
def test_weights_are_stored_once():
    """Embedding and head are one matrix of 16,384 tokens; each function has its operations too."""
    model = tiny_vision_model("smolvlm", layers=1, vocab_size=16384)
    table = model.lm_head.weight
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    size = len(lowered("smolvlm", decoder=VisionDecoder(model, context=CONTEXT)))
    assert weights < size < weights + table.numel() * 4 // 4


@pytest.mark.slow
def test_methods_have_only_the_buffers_they_use():
    """ExecuTorch would write others into the file, once for each method."""
    decoder = decoder_of("llava")
    held = {}
    for method, program in export_methods(decoder, layout_of(decoder)).items():
        users = {node.name: node.users for node in program.graph.nodes}
        signature = program.graph_signature.inputs_to_buffers
        assert all(users[name] for name in signature)
        held[method] = {name.rpartition(".")[2] for name in signature.values()}
    assert held["decode"] == held["prefill"] == {"cos", "sin"}
    assert held["vision"] == {"position_ids"}
    assert held["embed"] == set()


def check_in_torch(decoder: VisionDecoder, name: str) -> None:
    """Compare the logits of a text with two images with those of transformers."""
    logits = logits_of(tiny_vision_model(name), name, PROMPT, images_of(name))
    tokens = whole_text(name, PROMPT)
    with torch.no_grad():
        rows = decoder.embed(tokens)
        seen = [decoder.see(pixels)[0] for pixels in pixels_of(name)]
        rows[0, tokens[0] == IMAGE] = torch.cat(seen)
        actual = decoder(rows)[0]
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual, logits, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_the_modules_in_torch_compute_the_logits_of_transformers(name):
    """Made ready for export; the constructor compares with the same model before."""
    decoder = decoder_of(name)
    check_in_torch(decoder, name)
    assert decoder.positions == FAMILIES.get(name, VARIANTS.get(name)).positions


def test_what_computes_something_else_is_refused(monkeypatch):
    class Doubled(type(vision._FAMILIES["llava"])):
        def prepare(self, model, size):
            model.model.multi_modal_projector.linear_2.weight.mul_(2)

    monkeypatch.setitem(vision._FAMILIES, "llava", Doubled())
    with pytest.raises(LoweringError, match="computes something else"):
        decoder_of("llava")


def test_an_image_needs_room():
    with pytest.raises(OptionError, match=r"at least 19, of which the image takes 16\. Export"):
        VisionDecoder(tiny_vision_model("llava"), context=18)
    assert VisionDecoder(tiny_vision_model("llava"), context=19).context == 19


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("llava", (56, 70), "one size: got --image-size 56 x 70, expected 56 x 56. Leave out"),
        ("lfm2_vl", (56, 70), "size: got --image-size 56 x 70, expected multiples of 28 pixels"),
        ("qwen2_vl", (56, 70), "size: got --image-size 56 x 70, expected multiples of 28 pixels"),
        ("qwen3_vl", (28 * 64, 28 * 33), "too many positions: got 2,112, expected at most 2,048"),
    ],
)
def test_sizes_that_a_model_does_not_take_are_refused(name, size, message):
    with pytest.raises(OptionError, match=message):
        VisionDecoder(tiny_vision_model(name), context=4096, image_size=size)


def test_models_of_images_of_any_size_have_a_default():
    config = tiny_vision_model("qwen2_5_vl").config
    assert vision.image_size(config) == (448, 448)
    config.vision_config.patch_size = 16
    assert vision.image_size(config) == (448, 448)
    config.vision_config.patch_size = 15
    assert vision.image_size(config) == (420, 420)
    assert vision.image_size(config, (60, 30)) == (60, 30)


def test_an_image_whose_rows_see_each_other_is_in_one_call():
    decoder = decoder_of("gemma3")
    layout = replace(layout_of(decoder, name="gemma3"), chunk=15)
    with pytest.raises(
        OptionError, match=r"one call: got chunks of 15 tokens, expected at least 16"
    ):
        export_methods(decoder, layout)
    image = layout.image
    assert image is not None
    assert list(image.calls(40, [2, 20], 18)) == [18, 18, 4]
    assert list(image.calls(40, [2, 20], 17)) == [2, 17, 17, 4]
    assert list(image.calls(40, [1, 17], 16)) == [1, 16, 16, 7]
    assert list(image.calls(40, [3], 8)) == [8] * 5
    assert list(image.calls(5, [], 8)) == [5]


@pytest.mark.parametrize("model_type", [*vision.TEXT_REFUSED, "blip-2"])
def test_other_architectures_are_refused(model_type, tmp_path):
    reason = vision.REFUSED.get(model_type)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type}))
    kinds = "a causal language model, an encoder-decoder model, or one that reads images"
    known = f"{kinds}: {', '.join(FAMILIES)}"
    got = f"got model_type '{model_type}'" + (f", which has {reason}" if reason else "")
    with pytest.raises(OptionError, match=re.escape(f"{got}, expected {known}")):
        read_config(path)


@pytest.mark.parametrize("name", ["llava", "smolvlm", "gemma3", "qwen3_vl", "lfm2_vl"])
def test_checkpoints_are_read(name, tmp_path):
    tiny_vision_model(name).save_pretrained(tmp_path)
    family = FAMILIES[name]
    options = {"image_size": family.size} if family.chooses_size else {}
    config = read_config(tmp_path / "config.json")
    decoder = load_decoder(tmp_path, config, context=CONTEXT, **options)
    assert isinstance(decoder, VisionDecoder)
    is_tied = decoder.head.weight is decoder.embedding.weight
    assert is_tied == (name not in ("llava", "qwen3_vl"))
    check_in_torch(decoder, name)


def test_names_of_weights_on_the_hub_are_known(tmp_path):
    model = tiny_vision_model("llava")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tower = "vision_tower."
    weights = {
        name.replace(tower, f"{tower}vision_model."): weight
        for name, weight in load_file(file).items()
    }
    assert any(name.startswith("language_model.model.layers") for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    decoder = load_decoder(tmp_path, read_config(tmp_path / "config.json"), context=CONTEXT)
    expected_weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    for name, weight in decoder.state_dict().items():
        assert name.endswith(("cos", "sin")) or torch.equal(weight, expected_weights[name])


PROCESSORS = {
    "CLIPImageProcessor": {"size": {"shortest_edge": 60}, "crop_size": {"height": 56, "width": 56}},
    "SiglipImageProcessor": {"size": {"height": 56, "width": 56}, "resample": 2},
    "SmolVLMImageProcessor": {
        "do_image_splitting": False,
        "max_image_size": {"longest_edge": 56},
        "size": {"longest_edge": 150},
    },
    "GotOcr2ImageProcessor": {"size": {"height": 56, "width": 56}},
    "Gemma3ImageProcessor": {"size": {"height": 56, "width": 56}},
}


@pytest.mark.parametrize("crop", [(0, 427, 0, 640), (0, 427, 0, 201), (10, 81, 10, 61)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_prepared_as_by_transformers(name, crop, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    top, bottom, left, right = crop
    image = pillow.fromarray(load_sample_image("china.jpg")[top:bottom, left:right])
    getattr(transformers(), name)(**PROCESSORS[name]).save_pretrained(tmp_path)
    processor = transformers().AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected_pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    pixels = Preparation.read(tmp_path, (56, 56)).pixels(image)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (1, 3, 56, 56)
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(pixels, expected_pixels.view(1, 3, 56, 56), atol=atol, rtol=rtol)


@pytest.mark.parametrize("crop", [(0, 427, 0, 640), (0, 427, 0, 201)])
@pytest.mark.parametrize("patch", [14, 16])
def test_images_of_any_size_are_prepared_as_by_transformers(patch, crop, tmp_path):
    """An image to which the processor gives the size that the model was exported for."""
    pillow = pytest.importorskip("PIL.Image")
    top, bottom, left, right = crop
    image = pillow.fromarray(load_sample_image("china.jpg")[top:bottom, left:right])
    library = transformers()
    saved = library.Qwen2VLImageProcessor(
        patch_size=patch, size={"shortest_edge": 56 * 56, "longest_edge": 120**2}
    )
    saved.save_pretrained(tmp_path)
    processor = library.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = processor(images=image, return_tensors="pt")
    _, rows, columns = expected["image_grid_thw"][0].tolist()
    assert rows != columns
    pixels = Preparation.read(tmp_path, (rows * patch, columns * patch)).pixels(image)
    assert pixels.shape == (1, 3, rows * patch, columns * patch)
    config = library.Qwen2VLConfig().vision_config
    config.patch_size = patch
    patches = patch_towers.patches_of(pixels, config)
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(patches, expected["pixel_values"], atol=atol, rtol=rtol)


def test_images_that_the_processor_scales_without_pillow_are_close(tmp_path):
    """LFM2-VL's processor scales tensors, and rounds to whole values, of which one is 2 / 255."""
    pillow = pytest.importorskip("PIL.Image")
    image = pillow.fromarray(load_sample_image("china.jpg"))
    library = transformers()
    saved = library.Lfm2VlImageProcessor(encoder_patch_size=16, do_image_splitting=False)
    saved.save_pretrained(tmp_path)
    processor = library.AutoImageProcessor.from_pretrained(tmp_path, backend="torchvision")
    expected = processor(images=image, return_tensors="pt")
    rows, columns = expected["spatial_shapes"][0].tolist()
    assert rows != columns
    pixels = Preparation.read(tmp_path, (rows * 16, columns * 16)).pixels(image)
    config = library.Lfm2VlConfig()
    config.vision_config.patch_size = 16
    inputs = vision._FAMILIES["lfm2_vl"].model_inputs(config, pixels, torch.zeros(1, 1))
    assert torch.equal(inputs["spatial_shapes"], expected["spatial_shapes"])
    patches = expected["pixel_values"][:, : rows * columns]
    difference = (inputs["pixel_values"] - patches).abs()
    assert difference.max() < 2 / 255 + 1e-6
    assert difference.mean() < 2e-4


def test_images_may_be_described_with_the_whole_processor(tmp_path):
    processor = transformers().SiglipImageProcessor(size={"height": 56, "width": 56})
    text = json.dumps({"image_processor": processor.to_dict(), "processor_class": "Processor"})
    (tmp_path / "processor_config.json").write_text(text)
    assert Preparation.read(tmp_path, (56, 56)) == Preparation((56, 56), factor=1 / 255)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CLIPImageProcessor", {}, "another size .* got 224 x 224 pixels, expected 56 x 56"),
        ("CLIPImageProcessor", {"do_center_crop": False}, "not supported: got CLIPImageProcessor"),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 99}}, "not supported: got CLIPImage"),
        ("LlavaImageProcessor", {"do_pad": True}, "not supported: got LlavaImageProcessor"),
        (None, {}, r"cannot read how .* prepares images: .*\. Copy the preprocessor_config.json"),
    ],
)
def test_other_preparations_are_refused(name, options, message, tmp_path):
    if name is not None:
        getattr(transformers(), name)(**options).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=message):
        Preparation.read(tmp_path, (56, 56))


@pytest.mark.parametrize(
    "preparation",
    [
        Preparation((56, 42)),
        Preparation((56, 56), Fit.SHORTER, 60, "bilinear", 1.0, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
    ],
)
def test_a_layout_with_images_is_read_as_it_was_written(preparation):
    layout = Layout(97, 96, 8, CacheKind.STATE, image=ImageInput(90, 16, 32, preparation))
    constants = layout.constants()
    assert constants["get_llm_layout_version"] == 3
    assert layout.methods == ("vision", "embed", "forward")

    def outputs(name):
        return value if isinstance(value := constants[name], list) else [value]

    assert Layout.read(tuple(constants), outputs) == layout


def test_prompts_must_fit_their_images():
    image = ImageInput(90, 16, 32, Preparation((56, 56)))
    pixels = pixels_of("llava")
    image.check(PROMPT, pixels)
    assert image.length(PROMPT, 2) == 36
    with pytest.raises(InputError, match=r"got 2 times token 90, and 1 image\. Put the token into"):
        image.check(PROMPT, pixels[:1])
    with pytest.raises(InputError, match="got 0 times token 90, and 2 images"):
        image.check([1, 2], pixels)
    with pytest.raises(InputError, match=r"got \[1, 3, 56, 57\], expected \[1, 3, 56, 56\]"):
        image.check([90], [torch.zeros(1, 3, 56, 57)])


def test_a_text_stands_for_an_image_where_tokens_are_bytes():
    tokenizer = load_tokenizer(None, vocabulary=258, bos=256, image=257)
    assert tokenizer.encode("<image>a<image>b") == [256, 257, 97, 257, 98]
    assert tokenizer.encode("<imag>") == [256, *b"<imag>"]
    assert tokenizer.decode([97, 257, 98]) == "ab"
    of_text_alone = load_tokenizer(None, vocabulary=258, bos=None)
    assert of_text_alone.encode("<image>") == list(b"<image>")


def test_the_page_lists_the_families():
    text = vision_table.PAGE.read_text()
    assert vision_table.page(text) == text, "run PYTHONPATH=tests python -m tests.llm.vision_table"


@pytest.mark.parametrize("name", ["internvl", "llava"])
def test_configurations_give_one_side_or_two(name):
    values = configuration(name)
    config = transformers().AutoConfig.for_model(values.pop("model_type"), **values)
    assert vision.image_size(config) == (SIDE, SIDE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("cache", [CacheKind.STATE, CacheKind.BUFFER])
def test_executorchs_runner_writes_the_text_of_transformers(name, cache, tmp_path):
    """Chunks of an image and some tokens."""
    from executorch.extension.llm import runner as executorch

    decoder, model = decoder_of(name), tiny_vision_model(name)
    images, pixels = images_of(name), pixels_of(name)
    first, second, third = [5, 7, 11], [13, 17, 19], [23, 29]
    sizes = {"chunk": decoder.positions + 4, "cache": cache, "standard": True, "replaced": ()}
    layout = replace(layout_of(decoder, name=name), **sizes)
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    has_states = cache is CacheKind.STATE
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=has_states)
    path = tmp_path / "model.pte"
    path.write_bytes(lower(export_methods(decoder, layout), layout, partitioner).buffer)
    assert [len(report.partitions) for report in partitioner.reports] == [1, 1, 1]
    tokens = [*first, IMAGE, *second, IMAGE, *third]
    for _ in range(STEPS):
        tokens.append(most_probable(logits_of(model, name, tokens, images)[-1]))
    expected = tokens[-STEPS:]
    generator = Generator.load(path, engine="openvino")
    greedy = generator.generate(tokens[:-STEPS], most_probable, limit=STEPS, images=pixels)
    assert list(greedy) == expected
    runtime.register(engine="openvino")
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", decoder.vocabulary)
    runner = executorch.MultimodalRunner(str(path), str(tokenizer), None)
    pieces: list[str] = []
    runner.generate(
        [
            executorch.make_text_input(text_of(first)),
            executorch.make_image_input(pixels[0][0]),
            executorch.make_text_input(text_of(second)),
            executorch.make_image_input(pixels[1][0]),
            executorch.make_text_input(text_of(third)),
        ],
        executorch.GenerationConfig(echo=False, temperature=0.0, max_new_tokens=STEPS),
        pieces.append,
        None,
    )
    assert "".join(pieces) == text_of(expected)
    mark = text_of([IMAGE])
    prompt = mark.join(map(text_of, (first, second, third)))
    limit = {"limit": STEPS, "engine": "openvino"}
    result = executorch_runner.generate(path, tokenizer, prompt, pixels, **limit)
    assert result.text == "".join(filter(str.isprintable, text_of(expected)))
    assert result.prefill.tokens == len(first + second + third) + 2 * decoder.positions
    with pytest.raises(OptionError, match="a text in one call, which is longer than a chunk"):
        executorch_runner.generate(path, tokenizer, text_of([5] * (layout.chunk + 1)), **limit)
    with pytest.raises(InputError, match="got 2 times token"):
        executorch_runner.generate(path, tokenizer, prompt, pixels[:1], **limit)
