"""Weights of quantized checkpoints: integers that Core ML stores as they are, or floats.

GPTQ, AWQ, compressed-tensors and torchao store the matrix of a linear layer in several tensors. The
readers make one ``StoredWeight`` of them, so that a model of ``transformers`` has it like any other
weight. ``kept_quantization`` returns its integers, scales and zero points for the export.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.stored_weights import StoredWeight, in_memory
from coreml_delegate.patches.third_party import quiet_import

_logger = logging.getLogger(__name__)
_WORD = 32  # bits of the integers that formats pack smaller ones into
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the eight integers in a word

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A matrix [O, I] as integers, with scales for groups of neighbouring inputs.

    The matrix is ``scale * (integers - zero_point)``.

    Attributes:
        integers: int8 [O, I].
        scale: fp32 [O, G]; G divides I.
        zero_point: int8 or fp32 [O, G]; None for zeros.
        bits: Bits of an integer.
    """

    integers: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bits: int

    def dense(self) -> torch.Tensor:
        """Return the matrix, fp32 [O, I]."""
        outputs, groups = self.scale.shape
        values = self.integers.to(torch.float32).reshape(outputs, groups, -1)
        if self.zero_point is not None:
            values = values - self.zero_point.to(torch.float32)[..., None]
        return (values * self.scale[..., None]).reshape(self.integers.shape)

    def tensor(self) -> torch.Tensor:
        """Return the matrix as a quantized tensor of torchao, which the partitioner delegates."""
        with quiet_import():
            from torchao.quantization import IntxUnpackedToInt8Tensor
        zero_point = self.zero_point
        if zero_point is None:
            zero_point = torch.zeros(self.scale.shape, dtype=torch.int8)
        return IntxUnpackedToInt8Tensor(
            qdata=self.integers,
            scale=self.scale,
            zero_point=zero_point,
            target_dtype=getattr(torch, f"int{self.bits}"),
            block_size=(1, self.integers.shape[1] // self.scale.shape[1]),
            dtype=torch.float32,
            activation_quantization=None,
        )


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """Reads a quantized matrix from its file; a call returns it in fp32.

    Attributes:
        read: Returns the integers.
    """

    read: Callable[[], GroupedIntegers]

    def __call__(self) -> torch.Tensor:
        """Return the matrix, fp32 [O, I]."""
        return self.read().dense()


def kept_quantization(weight: torch.Tensor) -> GroupedIntegers | None:
    """Return the integers of a weight that its checkpoint stores quantized; None of other weights.

    A weight that was computed from others, such as experts that were stacked, is in float.
    """
    source = weight.read if isinstance(weight, StoredWeight) else None
    return source.read() if isinstance(source, QuantizedSource) else None


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether ``kept_quantization`` has integers, without reading them."""
    return isinstance(weight, StoredWeight) and isinstance(weight.read, QuantizedSource)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint whose tensors a reader replaces by weights.

    Attributes:
        tensors: By name; changed.
        quantization: ``quantization_config`` of the configuration.
        files: The files of the tensors.
    """

    tensors: dict[str, torch.Tensor]
    quantization: Mapping[str, Any]
    files: Iterable[Path]


def decode(
    tensors: Tensors, quantization: Mapping[str, Any], files: Iterable[Path]
) -> dict[str, torch.Tensor]:
    """Return the weights of a quantized checkpoint by the names that the model has for them.

    Args:
        tensors: The tensors of the checkpoint by name; integers in their dtype.
        quantization: ``quantization_config`` of its configuration.
        files: The files of the tensors.

    Raises:
        OptionError: The format is unknown, or a variant that is not supported.
    """
    require_format(quantization)
    weights = dict(tensors)
    _READERS[_method(quantization)](_Checkpoint(weights, quantization, files))
    decoded = [weight for name, weight in weights.items() if weight is not tensors.get(name)]
    warn_of_floats(len(decoded), decoded, "Core ML has no form for them")
    return weights


def count_quantized(weights: Iterable[torch.Tensor]) -> int:
    """Return the number of weights that their checkpoint stores quantized."""
    return sum(map(is_quantized, weights))


def warn_of_floats(quantized: int, weights: Iterable[torch.Tensor], reason: str) -> None:
    """Log that some quantized weights have become floats.

    Args:
        quantized: Number of weights that were quantized.
        weights: All weights of the loaded model.
        reason: Why.
    """
    floats = quantized - count_quantized(weights)
    if floats > 0:
        _logger.warning(
            "%d of %d quantized weights are used in floating point, because %s",
            floats,
            quantized,
            reason,
        )


def require_format(quantization: object) -> None:
    """Check the format of a quantized checkpoint.

    Args:
        quantization: ``quantization_config`` of its configuration.

    Raises:
        OptionError: It is unknown.
    """
    method = _method(quantization) if isinstance(quantization, Mapping) else repr(quantization)
    if method not in _READERS:
        raise OptionError(
            "the checkpoint is quantized in a format that is not supported",
            got=f"quant_method {method}",
            expected=", ".join(_READERS),
            remedy="Use the unquantized checkpoint, and pass --quantize",
        )


def _method(quantization: Mapping[str, Any]) -> str:
    return str(quantization.get("quant_method", "none"))


def _layers(tensors: dict[str, torch.Tensor], key: str) -> list[tuple[str, Tensors]]:
    """Take out the tensors, without the bias, of each layer that has a tensor named ``key``.

    Returns:
        Prefixes of names, each with the tensors by the rest of their names.
    """
    layers: dict[str, dict[str, torch.Tensor]] = {
        name.removesuffix(key): {} for name in tensors if name.endswith(f".{key}")
    }
    for name in list(tensors):
        prefix, dot, part = name.rpartition(".")
        if prefix + dot in layers and part != "bias":
            layers[prefix + dot][part] = tensors.pop(name)
    return list(layers.items())


def _stored(
    shape: Iterable[int], read: Callable[[], GroupedIntegers], order: torch.Tensor | None = None
) -> StoredWeight:
    """Return the weight of a layer.

    Args:
        shape: Its shape.
        read: Returns its integers.
        order: Group of each input [I]; None if groups are equally many neighbouring inputs.
    """
    size = torch.Size(shape)
    if order is not None:
        order, inputs = order.to(torch.int64), size[1]
        if not torch.equal(order, torch.arange(inputs) * (int(order.max()) + 1) // inputs):
            return StoredWeight(partial(_reordered, read, order), size)
    return StoredWeight(QuantizedSource(read), size)


def _reordered(read: Callable[[], GroupedIntegers], order: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose groups are of any inputs."""
    grouped = read()
    values = grouped.integers.to(torch.float32)
    if grouped.zero_point is not None:
        values = values - grouped.zero_point.to(torch.float32)[:, order]
    return values * grouped.scale[:, order]


def _unsupported(what: str, got: object, expected: str) -> OptionError:
    return OptionError(
        f"the checkpoint has {what} that is not supported", got=str(got), expected=expected
    )


# GPTQ


def _read_gptq(checkpoint: _Checkpoint) -> None:
    """Read ``qweight`` [I * bits / 32, O], ``qzeros`` [G, O * bits / 32], ``scales`` [G, O].

    ``g_idx`` [I] has the group of each input.
    """
    form = checkpoint.quantization.get("checkpoint_format", "gptq")
    bits = int(checkpoint.quantization["bits"])
    if form not in _SHIFTS:
        raise _unsupported("a form of GPTQ", form, ", ".join(_SHIFTS))
    for prefix, parts in _layers(checkpoint.tensors, "qweight"):
        words, outputs = parts["qweight"].shape
        read = partial(_gptq_integers, parts, bits, _SHIFTS[form])
        shape = (outputs, words * _WORD // bits)
        checkpoint.tensors[f"{prefix}weight"] = _stored(shape, read, parts.get("g_idx"))


_SHIFTS = {"gptq": 1, "gptq_v2": 0}
"""Difference of zero points to the stored ones, by form."""


def _gptq_integers(parts: Tensors, bits: int, shift: int) -> GroupedIntegers:
    integers = _unpack(in_memory(parts["qweight"]).T, bits)
    zeros = (_unpack(in_memory(parts["qzeros"]), bits).T + shift) % 2**bits
    return _centred(integers, in_memory(parts["scales"]).T, zeros, bits)


# AWQ


def _read_awq(checkpoint: _Checkpoint) -> None:
    """Read ``qweight`` [I, O / 8], ``qzeros`` [G, O / 8] and ``scales`` [G, O]."""
    version = checkpoint.quantization.get("version", "gemm")
    bits = checkpoint.quantization.get("bits", 4)
    if str(version).lower() != "gemm" or bits != 4:
        raise _unsupported("a form of AWQ", f"{version} with {bits} bits", "gemm with 4 bits")
    for prefix, parts in _layers(checkpoint.tensors, "qweight"):
        inputs, words = parts["qweight"].shape
        read = partial(_awq_integers, parts)
        checkpoint.tensors[f"{prefix}weight"] = _stored((words * len(_AWQ_ORDER), inputs), read)


def _awq_integers(parts: Tensors) -> GroupedIntegers:
    integers, zeros = (
        _unpack(in_memory(parts[name]), 4).unflatten(1, (-1, 8))[..., _AWQ_POSITIONS].flatten(1).T
        for name in ("qweight", "qzeros")
    )
    return _centred(integers, in_memory(parts["scales"]).T, zeros, 4)


_AWQ_POSITIONS = [_AWQ_ORDER.index(column) for column in range(len(_AWQ_ORDER))]


# compressed-tensors


def _read_compressed_tensors(checkpoint: _Checkpoint) -> None:
    """Read ``weight_packed`` with integers in words, or ``weight`` with a number in each byte.

    Both have ``weight_scale``. Activations stay in float.
    """
    form = checkpoint.quantization.get("format")
    groups = checkpoint.quantization.get("config_groups", {}).values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    bits = {int(arguments["num_bits"]) for arguments in weights}
    kinds = {arguments.get("type", "int") for arguments in weights}
    if any(group.get("input_activations") for group in groups):
        _logger.warning("activations, which the checkpoint quantizes too, stay in floating point")
    if len(kinds) > 1:
        raise _unsupported("a form of compressed-tensors", f"{form} of several types", _FORMS)
    is_float = kinds == {"float"}
    for prefix, parts in _layers(checkpoint.tensors, "weight_packed"):
        if is_float or "weight_shape" not in parts:
            raise _unsupported("a form of compressed-tensors", form, _FORMS)
        shape = [int(size) for size in parts["weight_shape"]]
        read = partial(_packed_integers, parts, _width(parts["weight_packed"], shape[1], bits))
        order = parts.get("weight_g_idx")
        checkpoint.tensors[f"{prefix}weight"] = _stored(shape, read, order)
    for prefix, parts in _layers(checkpoint.tensors, "weight_scale"):
        weight = parts["weight"]
        checkpoint.tensors[f"{prefix}weight"] = (
            StoredWeight(partial(_scaled, parts), weight.shape)
            if is_float
            else _stored(weight.shape, partial(_byte_integers, parts))
        )


_FORMS = "pack-quantized, int-quantized or float-quantized"


def _width(words: torch.Tensor, inputs: int, bits: Iterable[int]) -> int:
    """Return the bits of an integer in rows of words."""
    for width in bits:
        if words.shape[1] == -(-inputs * width // _WORD):
            return width
    raise _unsupported(
        "a packed weight", f"{words.shape[1]} words for {inputs} integers", f"{bits} bits for each"
    )


def _packed_integers(parts: Tensors, bits: int) -> GroupedIntegers:
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    integers = _unpack(in_memory(parts["weight_packed"]), bits)[:, :inputs]
    scale, zeros = _scale(parts, outputs), None
    if "weight_zero_point" in parts:
        zeros = _unpack(in_memory(parts["weight_zero_point"]).T, bits)[:, :outputs].T
    return _centred(integers, scale, zeros, bits)


def _byte_integers(parts: Tensors) -> GroupedIntegers:
    integers = in_memory(parts["weight"]).to(torch.int8)
    scale, zeros = _scale(parts, len(integers)), parts.get("weight_zero_point")
    if zeros is not None:
        zeros = in_memory(zeros).to(torch.int8).reshape(-1, scale.shape[1])
        zeros = zeros.expand(scale.shape).contiguous()
    return GroupedIntegers(integers, scale, zeros, 8)


def _scale(parts: Tensors, outputs: int) -> torch.Tensor:
    """Return the scales [O, G] of ``outputs`` rows; a single scale is for all rows."""
    scale = in_memory(parts["weight_scale"])
    return (
        scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
        .expand(outputs, -1)
        .contiguous()
    )


def _scaled(parts: Tensors) -> torch.Tensor:
    """Return floats times their scales, which are for all, for a row, or for blocks."""
    values, scale = in_memory(parts["weight"]), in_memory(parts["weight_scale"])
    if scale.dim() < 2:
        return values * scale.reshape(-1, 1)
    for axis in (0, 1):
        scale = scale.repeat_interleave(-(-values.shape[axis] // scale.shape[axis]), axis)
    return values * scale[: values.shape[0], : values.shape[1]]


# torchao


def _read_torchao(checkpoint: _Checkpoint) -> None:
    """Read the tensors that torchao has split; the metadata of their files describes them."""
    metadata: dict[str, str] = {}
    for path in checkpoint.files:
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata() or {}
    for name in json.loads(metadata.get("tensor_names", "[]")):
        description = json.loads(metadata[name])
        kind, module, weight = description["_type"], *name.rsplit(".", 1)
        if kind == torch.Tensor.__name__:
            continue
        names = [f"{module}._{weight}_{part}" for part in description["_tensor_data_names"]]
        parts = {part: checkpoint.tensors.pop(part) for part in names}
        read = partial(_restored, name, metadata[name], parts)
        if kind in _INTEGERS_OF_TORCHAO:
            shape = parts[f"{module}._{weight}_qdata"].shape
            checkpoint.tensors[name] = _stored(shape, partial(_integers_of, read))
        elif hasattr(read(), "dequantize"):
            checkpoint.tensors[name] = StoredWeight(partial(_dequantized, read), read().shape)
        else:
            raise _unsupported("a tensor of torchao", kind, ", ".join(_INTEGERS_OF_TORCHAO))


_INTEGERS_OF_TORCHAO = ("IntxUnpackedToInt8Tensor", "Int8Tensor")


def _restored(name: str, description: str, parts: Tensors) -> Any:
    """Return a quantized tensor of torchao; floats of its parts are fp32."""
    with quiet_import():
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    tensors = {part: in_memory(tensor) for part, tensor in parts.items()}
    metadata = {name: description, "tensor_names": json.dumps([name])}
    return unflatten_tensor_state_dict(tensors, metadata)[0][name]


def _dequantized(read: Callable[[], Any]) -> torch.Tensor:
    return read().dequantize().to(torch.float32)


def _integers_of(read: Callable[[], Any]) -> GroupedIntegers:
    tensor = read()
    (_, columns), (outputs, inputs) = tensor.block_size, tensor.qdata.shape
    groups = inputs // columns if columns > 0 else 1

    def by_row(values: torch.Tensor) -> torch.Tensor:
        blocks = values.reshape(-1, groups)
        return blocks.repeat_interleave(outputs // len(blocks), 0).contiguous()

    target = getattr(tensor, "target_dtype", torch.int8)
    zeros = getattr(tensor, "zero_point", None)
    return GroupedIntegers(
        tensor.qdata,
        by_row(tensor.scale).to(torch.float32),
        None if zeros is None or not zeros.any() else by_row(zeros),
        int(str(target).removeprefix("torch.int")),
    )


# Floats of 8 and 4 bits


def _read_fp8(checkpoint: _Checkpoint) -> None:
    """Read ``weight`` in fp8, with factors for blocks in ``weight_scale_inv``."""
    if checkpoint.quantization.get("activation_scheme", "dynamic") != "dynamic":
        raise _unsupported("a form of fp8", checkpoint.quantization["activation_scheme"], "dynamic")
    for prefix, parts in _layers(checkpoint.tensors, "weight_scale_inv"):
        values = {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}
        checkpoint.tensors[f"{prefix}weight"] = StoredWeight(
            partial(_scaled, values), values["weight"].shape
        )


def _read_mxfp4(checkpoint: _Checkpoint) -> None:
    """Read the experts' ``_blocks`` [E, O, G, 16] and ``_scales`` [E, O, G], both in bytes."""
    for name in [name for name in checkpoint.tensors if name.endswith("_blocks")]:
        blocks, weight = checkpoint.tensors.pop(name), name.removesuffix("_blocks")
        scales = checkpoint.tensors.pop(f"{weight}_scales")
        experts, outputs, groups, size = blocks.shape
        shape = torch.Size((experts, 2 * groups * size, outputs))
        checkpoint.tensors[weight] = StoredWeight(partial(_mxfp4_experts, blocks, scales), shape)


def _mxfp4_experts(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = in_memory(blocks), in_memory(scales)
    return convert_moe_packed_tensors(*parts, dtype=torch.float32)


_READERS: Mapping[str, Callable[[_Checkpoint], None]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "torchao": _read_torchao,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}


def _centred(
    integers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> GroupedIntegers:
    """Return unsigned integers as signed ones, with zero points only if they are needed.

    Args:
        integers: [O, I], from 0 to ``2**bits - 1``.
        scale: [O, G].
        zeros: Zero points [O, G] of the unsigned integers; None for the middle.
        bits: Bits of an integer.
    """
    middle = 2 ** (bits - 1)
    signed = None if zeros is None else (zeros - middle).to(torch.int8).contiguous()
    return GroupedIntegers(
        (integers - middle).to(torch.int8).contiguous(),
        scale.to(torch.float32).contiguous(),
        None if signed is None or not signed.any() else signed,
        bits,
    )


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers [R, W * 32 / bits] in rows of words int32 [R, W].

    The bits of a row follow each other from the lowest on; an integer of 3 bits may begin in one
    word and end in the next.
    """
    if _WORD % bits:
        stream = _unpack(words, 1).reshape(len(words), -1, bits)
        return (stream << torch.arange(bits, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(1)
