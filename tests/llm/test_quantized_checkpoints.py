"""Quantized checkpoints: the numbers of the libraries that define the formats, in integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm.test_families import CONTEXT
from llm.test_weight_modes import check_program
from safetensors.torch import load_file, save_file
from support.checkpoints import save
from support.tolerances import ATOL_RTOL_DEQUANTIZED
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import load_decoder, load_model, read_config
from coreml_delegate.llm.export import quantize_weights
from coreml_delegate.llm.quantized_checkpoint import kept_quantization
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.quantization import QuantizationAssignment, mode_of

pytestmark = pytest.mark.xdist_group("quantized checkpoints")

GROUP = 16
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # words of 3 bits have 32 integers


def rewrite(folder: Path, quantization: dict[str, Any], split: Any) -> dict[str, torch.Tensor]:
    """Save a Llama whose linear layers are quantized; return their expected weights by name.

    Args:
        folder: Of the checkpoint.
        quantization: ``quantization_config``.
        split: Takes a matrix; returns the tensors of the format by name, and the weight.
    """
    save(folder, "llama", **SIZES)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        parts, weight = split(tensors.pop(name))
        expected[name] = weight
        tensors |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, quantization)
    return expected


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps({**values, "quantization_config": quantization}))


def quantized(weight: torch.Tensor, bits: int, *, symmetric: bool = False, group: int = GROUP):
    """Quantize a matrix [O, I]; returns unsigned integers, scales and zero points [O, G]."""
    blocks = weight.reshape(len(weight), -1, group)
    least, most = blocks.amin(-1), blocks.amax(-1)
    if symmetric:
        most = blocks.abs().amax(-1)
        least = -most
    scale = ((most - least) / (2**bits - 1)).half().float()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-least / scale).round()
    zero = zero.clamp(0, 2**bits - 1)
    integers = (blocks / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return integers.reshape(weight.shape).int(), scale, zero.int()


def dense(integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    per_weight = (t.repeat_interleave(integers.shape[1] // t.shape[1], 1) for t in (scale, zero))
    scales, zeros = per_weight
    return scales * (integers - zeros)


def packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of integers as bits that follow each other, in words of 32 bits."""
    values = integers.numpy().astype(np.uint32)
    stream = (values[..., None] >> np.arange(bits)) & 1
    rows = stream.reshape(len(values), -1).astype(np.uint8)
    return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").view(np.int32).copy())


def gptq(bits: int, *, form: str = "gptq", symmetric: bool = False, order: Any = None):
    def split(weight: torch.Tensor):
        integers, scale, zero = quantized(weight, bits, symmetric=symmetric)
        groups = torch.arange(weight.shape[1]) // GROUP
        matrix = dense(integers, scale, zero)
        if order is not None:
            columns = torch.randperm(
                weight.shape[1], generator=torch.Generator().manual_seed(order)
            )
            integers, matrix, groups = integers[:, columns], matrix[:, columns], groups[columns]
        stored = zero if form == "gptq_v2" else (zero - 1) % 2**bits
        parts = {
            "qweight": packed(integers, bits).T.contiguous(),
            "qzeros": packed(stored.T.contiguous(), bits),
            "scales": scale.T.half().contiguous(),
            "g_idx": groups.int(),
        }
        return parts, matrix

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": form}
    return config, split


def awq():
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(integers: torch.Tensor) -> torch.Tensor:
        """[I, O] in words of eight columns, whose order is AutoAWQ's ``order_map``."""
        result = torch.zeros(integers.shape[0], integers.shape[1] // 8, dtype=torch.int32)
        for column in range(result.shape[1]):
            for position, offset in enumerate(order):
                result[:, column] |= integers[:, 8 * column + offset].int() << (4 * position)
        return result

    def split(weight: torch.Tensor):
        integers, scale, zero = quantized(weight, 4)
        parts = {"qweight": words(integers.T), "qzeros": words(zero.T)}
        return {**parts, "scales": scale.T.half().contiguous()}, dense(integers, scale, zero)

    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, split


def compressed_tensors(form: str, **weights: Any):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(**{"num_bits": 4, "group_size": GROUP, **weights})
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.load_from_registry(form)
    is_float = arguments.type == "float"

    def split(weight: torch.Tensor):
        size = arguments.group_size or weight.shape[1]
        _, scale, zero = quantized(
            weight, arguments.num_bits, symmetric=arguments.symmetric, group=size
        )
        middle = 2 ** (arguments.num_bits - 1)
        if is_float:
            scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        state = {"weight": weight, "weight_scale": scale}
        if not arguments.symmetric:
            state["weight_zero_point"] = (zero - middle).to(torch.int8)
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(parts, scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
    return config, split


def fp8(block: int):
    """Bytes with a factor for each block of rows and columns, as DeepSeek's."""

    def split(weight: torch.Tensor):
        rows, columns = weight.shape
        counts = -(-rows // block), -(-columns // block)
        scale = torch.linspace(0.5, 1.5, counts[0] * counts[1]).reshape(counts)
        values = weight.to(torch.float8_e4m3fn)
        matrix = values.float()
        for row in range(rows):
            for column in range(columns):
                matrix[row, column] *= scale[row // block, column // block]
        return {"weight": values, "weight_scale_inv": scale}, matrix

    return {"quant_method": "fp8", "weight_block_size": [block, block]}, split


FORMATS = {
    "gptq-2": lambda: gptq(2),
    "gptq-3": lambda: gptq(3),
    "gptq-4": lambda: gptq(4),
    "gptq-8-symmetric": lambda: gptq(8, symmetric=True),
    "gptq-4-second-form": lambda: gptq(4, form="gptq_v2"),
    "awq": awq,
    "pack-quantized": lambda: compressed_tensors("pack-quantized", strategy="group"),
    "pack-quantized-zero-points": lambda: compressed_tensors(
        "pack-quantized", strategy="group", symmetric=False
    ),
    "pack-quantized-channels": lambda: compressed_tensors(
        "pack-quantized", num_bits=8, strategy="channel", group_size=None
    ),
    "int-quantized": lambda: compressed_tensors(
        "int-quantized", num_bits=8, strategy="channel", group_size=None
    ),
}


def gptq_with_a_short_group():
    """The last of groups of 40 inputs has fewer: 64 or 96 are no multiple."""

    def split(weight: torch.Tensor):
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // 40
        count = int(groups.max()) + 1
        integers, scale, zero = quantized(weight, 4, group=inputs)
        factors = 1 + torch.arange(count) / 2
        scale, zero = (scale * factors).half().float(), zero.expand(-1, count)
        parts = {
            "qweight": packed(integers, 4).T.contiguous(),
            "qzeros": packed(((zero - 1) % 16).T.contiguous(), 4),
            "scales": scale.T.half().contiguous(),
            "g_idx": groups.int(),
        }
        return parts, scale[:, groups] * (integers - zero[:, groups])

    return {"quant_method": "gptq", "bits": 4, "group_size": 40}, split


IN_FLOAT = {
    "gptq-4-with-a-short-group": gptq_with_a_short_group,
    "fp8": lambda: fp8(32),
    "gptq-4-in-any-order": lambda: gptq(4, order=3),
    "float-quantized": lambda: compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="channel", group_size=None
    ),
}


def load(folder: Path):
    return load_decoder(folder, read_config(folder / "config.json"), context=CONTEXT)


def check_weights(folder: Path, expected: dict[str, torch.Tensor], *, kept: bool) -> None:
    model = load_model(folder, read_config(folder / "config.json"))
    weights = dict(model.named_parameters())
    atol, rtol = ATOL_RTOL_DEQUANTIZED
    for name, weight in expected.items():
        torch.testing.assert_close(in_memory(weights[name]), weight, atol=atol, rtol=rtol)
        integers = kept_quantization(weights[name])
        assert (integers is not None) == kept
        if integers is not None:
            restored: Any = integers.tensor()
            torch.testing.assert_close(restored.dequantize(), weight, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_those_of_the_checkpoint(name, tmp_path):
    check_weights(tmp_path, rewrite(tmp_path, *FORMATS[name]()), kept=True)


@pytest.mark.parametrize("name", IN_FLOAT)
def test_other_forms_are_computed_in_float(name, tmp_path, caplog):
    check_weights(tmp_path, rewrite(tmp_path, *IN_FLOAT[name]()), kept=False)
    assert "quantized weights are used in floating point" in caplog.text


@torch.no_grad()
def test_tensors_of_torchao_are_restored(tmp_path):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    model = save(tmp_path, "llama", **SIZES)
    int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
    for layer, config in zip(model.model.layers, (int4, Int8WeightOnlyConfig()), strict=True):
        quantize_(layer, config)
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight}
    expected = {
        name: weight.dequantize() for name, weight in state.items() if name.endswith("proj.weight")
    }
    state = {name: weight.data for name, weight in state.items()}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    configure(tmp_path, {"quant_method": "torchao"})
    check_weights(tmp_path, expected, kept=True)


@torch.no_grad()
def test_experts_in_mxfp4_have_the_numbers_of_transformers(tmp_path, caplog):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save(tmp_path, "gpt_oss", **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        scales = torch.randint(120, 126, shape[:-1], dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "mxfp4"})
    check_weights(tmp_path, expected, kept=False)
    assert "used in floating point" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("name", ["gptq-4", pytest.param("awq", marks=pytest.mark.slow)])
def test_programs_have_the_checkpoints_integers(name, tmp_path):
    rewrite(tmp_path, *FORMATS[name]())
    decoder = load(tmp_path)
    # The modes are for the layers that the checkpoint does not quantize: the head.
    quantize_weights(decoder, linear=QuantizationAssignment(mode_of("int8-channel")))
    kinds = {
        path: type(module.weight.data).__name__
        for path, module in decoder.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert set(kinds.values()) == {"IntxUnpackedToInt8Tensor"}
    layer: Any = decoder.model.model.layers[0].self_attn.q_proj.weight
    assert (layer.target_dtype, layer.block_size) == (torch.int4, (1, GROUP))
    assert decoder.head.weight.target_dtype == torch.int8
    check_program(decoder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quip"}, "format that is not supported: got quant_method quip"),
        ({"bits": 4}, "got quant_method none, expected gptq, awq, compressed-tensors, torchao"),
        ([4], r"got quant_method \[4\]"),
        ({"quant_method": "awq", "version": "gemv"}, "got gemv with 4 bits, expected gemm with 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "got marlin"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    kind: {"weights": {"num_bits": 8, "type": kind}} for kind in ("int", "float")
                },
            },
            "got mixed-precision of several types",
        ),
    ],
)
def test_other_formats_are_refused(quantization, message, tmp_path):
    rewrite(tmp_path, *FORMATS["gptq-4"]())
    configure(tmp_path, quantization)
    with pytest.raises(OptionError, match=message):
        load(tmp_path)
