"""Several adapters in one ``.pte``: each method's numbers, and weights that are stored once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import Matrices, matrices, merged, save_adapter
from support.checkpoints import CONFIG, tiny_model
from support.llm_families import FAMILIES
from support.lowering import fp32_specs
from support.quantization import few_bits
from support.tolerances import SQNR_FP16, logits_bounds, sqnr_db

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.llm.adapters import read_adapters
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.low_rank import Adapter, attached, fit_adapter
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.scripts.summary import summarize_pte
from coreml_delegate.targets import Opset

pytestmark = pytest.mark.slow

CONTEXT, CHUNK, STEPS = 64, 8, 16
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
NAMES = ("first", "second")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ONE_LAYER = {"num_hidden_layers": 1}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Exported:
    """A file with two adapters, and what it was made of.

    Attributes:
        path: The ``.pte``.
        decoder: The decoder, quantized if the weights of the file are.
        adapters: Both adapters.
        models: Models of transformers by adapter; None is the base model.
    """

    path: Path
    decoder: Decoder
    adapters: Sequence[Adapter]
    models: dict[str | None, Any]

    @functools.cached_property
    def weights(self) -> list[dict[str, Any]]:
        """The stored weights of each model in the file."""
        delegates = [d for m in summarize_pte(self.path)["methods"] for d in m["delegates"]]
        models = {delegate["identifier"]: delegate["model"] for delegate in delegates}
        return [model["weights"] for model in models.values()]


def given(model: Any, ends: Sequence[str]) -> dict[str, Matrices]:
    return {
        name: matrices(model, ends, rank, seed)
        for name, rank, seed in zip(NAMES, (4, 12), (1, 2), strict=True)
    }


def exported(
    folder: Path,
    kind: str,
    ends: Sequence[str],
    changes: dict[str, Any] | None = None,
    *,
    precision: Precision = Precision.FLOAT32,
    cache: CacheKind = CacheKind.IO,
    linear: str = "none",
    names: Sequence[str] = NAMES,
) -> Exported:
    changes = {**FAMILIES[kind].changes, "max_position_embeddings": CONTEXT, **(changes or {})}
    model = tiny_model(kind, **changes)
    updates = {name: each for name, each in given(model, ends).items() if name in names}
    files = read_adapters(
        [(name, save_adapter(folder / name, model, each)) for name, each in updates.items()]
    )
    decoder = Decoder(tiny_model(kind, **changes), context=CONTEXT)
    adapters = [fit_adapter(decoder, file) for file in files]
    quantize_weights(decoder, **few_bits(linear))
    layout = Layout(CONFIG["vocab_size"], CONTEXT, CHUNK, cache, adapters=tuple(names))
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_methods(decoder, layout, adapters), layout, partitioner)
    for report in partitioner.reports:
        (partition,) = report.partitions
        assert not partition.not_shared
    path = folder / f"{len(names)}.pte"
    path.write_bytes(program.buffer)
    # A factor of 8 by the rank.
    scales = {name: 8 / adapter.ranks[0] for name, adapter in zip(names, adapters, strict=True)}
    changed = {name: merged(model, each, scales[name]) for name, each in updates.items()}
    return Exported(path, decoder, adapters, {None: model, **changed})


def check(made: Exported, engine: str, bound: float | None = None) -> None:
    """Compare each method's logits and greedy tokens with those of its model."""
    texts: list[list[int]] = []
    for name, model in made.models.items():
        generator = Generator.load(made.path, adapter=name, engine=engine)
        tokens, found = list(PROMPT), [generator.feed(PROMPT)]
        for _ in range(STEPS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
            found.append(generator.feed(tokens[-1:]))
        with torch.no_grad():
            expected = model(torch.tensor([tokens]), use_cache=False).logits[0, len(PROMPT) - 1 :]
        actual = torch.stack(found)
        texts.append(tokens)
        if bound is None:
            atol, rtol = logits_bounds(expected)
            torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
            assert actual[:-1].argmax(-1).tolist() == tokens[len(PROMPT) :]
        else:
            assert sqnr_db(expected.numpy(), actual.numpy()) > bound
    assert len({tuple(tokens) for tokens in texts}) == len(texts)


@pytest.mark.parametrize(
    ("kind", "ends", "changes"),
    [
        ("llama", LINEAR, {}),
        ("llama", ("q_proj", "embed_tokens", "lm_head"), TIED),
        ("gpt2", ("c_attn", "c_proj"), {}),
        ("phi3", ("qkv_proj",), {}),
    ],
    ids=["llama", "tied", "gpt2", "phi3"],
)
def test_each_method_computes_what_its_merged_model_does(kind, ends, changes, tmp_path):
    check(exported(tmp_path, kind, ends, changes), "openvino")


@pytest.mark.parametrize(
    ("kind", "cache", "engine"),
    [
        ("llama", CacheKind.IO, "openvino"),
        ("llama", CacheKind.STATE, "openvino"),
        ("gpt2", CacheKind.IO, "reference"),
        ("gemma3_text", CacheKind.STATE, "reference"),
    ],
)
def test_fp16_and_states_stay_close(kind, cache, engine, tmp_path):
    ends = ("c_attn", "c_fc") if kind == "gpt2" else ("q_proj", "v_proj", "up_proj")
    options: Any = {"precision": Precision.FLOAT16, "cache": cache, "names": NAMES[:1]}
    made = exported(tmp_path, kind, ends, **options)
    check(made, engine, SQNR_FP16)


@pytest.mark.parametrize(
    ("linear", "cache"),
    [("none", CacheKind.IO), ("int4", CacheKind.IO), ("int8", CacheKind.STATE)],
)
def test_the_file_has_the_base_model_once(linear, cache, tmp_path):
    options: Any = {"precision": Precision.FLOAT16, "linear": linear, "cache": cache}
    base = exported(tmp_path, "llama", LINEAR, ONE_LAYER, names=(), **options)
    both = exported(tmp_path, "llama", LINEAR, ONE_LAYER, **options)
    (alone,), (together,) = base.weights, both.weights

    def stored(weights: dict[str, Any]) -> Counter[tuple[Any, ...]]:
        """Matrices; vectors are biases of zeros, and norms."""
        shapes = ((tuple(t["shape"]), t["stored_as"]) for t in weights["tensors"])
        return Counter((shape, kind) for shape, kind in shapes if len(shape) > 1)

    matrices = [
        (tuple(parameter.shape), "fp16")
        for adapter in both.adapters
        for module in adapter.modules.values()
        for parameter in module.parameters(recurse=False)
    ]
    assert stored(together) == stored(alone) + Counter(matrices)
    rest = together["bytes"] - alone["bytes"] - sum(2 * each.elements for each in both.adapters)
    # A linear layer has a bias of zeros, and beside adapters it is a product without one.
    vectors = [t["stored_bytes"] for t in alone["tensors"] if len(t["shape"]) == 1]
    assert abs(rest) <= sum(vectors)


def test_adapters_stay_in_float_beside_a_quantized_base(tmp_path):
    made = exported(tmp_path, "llama", LINEAR, ONE_LAYER, linear="int4", names=NAMES[:1])
    tokens = torch.tensor([PROMPT])
    for adapter in (None, *made.adapters):
        with torch.no_grad(), attached(made.decoder, adapter):
            expected = made.decoder(tokens)[0, -1]
        name = None if adapter is None else adapter.name
        actual = Generator.load(made.path, adapter=name, engine="openvino").feed(PROMPT)
        atol, rtol = logits_bounds(expected)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_equal_adapters_give_equal_bytes(tmp_path):
    first, again = (
        exported(tmp_path / name, "llama", ("q_proj",), ONE_LAYER, names=NAMES[:1]) for name in "ab"
    )
    assert first.path.read_bytes() == again.path.read_bytes()


def test_texts_of_one_program_do_not_mix(tmp_path):
    """Two generators over one loaded program have caches of their own."""
    from coreml_delegate import runtime

    made = exported(tmp_path, "llama", LINEAR, ONE_LAYER)
    program = runtime.load_program(made.path, engine="openvino")
    apart = {name: Generator.load(made.path, adapter=name, engine="openvino") for name in NAMES}
    mixed = {name: Generator(program, adapter=name) for name in NAMES}
    for token in PROMPT:
        for name in NAMES:
            assert torch.equal(mixed[name].feed([token]), apart[name].feed([token]))
