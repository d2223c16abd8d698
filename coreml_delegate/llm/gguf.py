"""Language models in GGUF files, as ``transformers`` reads them, with the integers of their blocks.

``transformers`` computes all weights in fp32. A matrix whose blocks are integers with scales keeps
them: the block format gives the same numbers, in rows of another order where llama.cpp permutes
heads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.quantized_checkpoint import (
    GroupedIntegers,
    QuantizedSource,
    warn_of_floats,
)
from coreml_delegate.llm.stored_weights import StoredWeight
from coreml_delegate.patches.third_party import (
    import_optional,
    quiet_import,
    transformers,
    wrap_errors,
)

_REQUIRED = ("gguf", "accelerate")  # by transformers
_FLOATS = ("F32", "F16", "BF16", "F64")


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def read_gguf_config(path: Path) -> Any:
    """Return the configuration of ``transformers`` for the model in a GGUF file.

    Raises:
        OptionError: The file does not exist or is malformed, or ``transformers`` does not know the
            architecture; or a package is not installed.
    """
    if not path.is_file():
        raise OptionError("no such GGUF file", got=str(path))
    for name in _REQUIRED:
        import_optional(name)
    with wrap_errors(f"transformers cannot read {path}"):
        return transformers().AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )


def load_gguf(path: Path, config: Any, model_class: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the model in a GGUF file, and the report of its loading.

    Args:
        path: The file.
        config: Its configuration.
        model_class: Auto class of ``transformers``.

    Raises:
        OptionError: ``transformers`` cannot read the file.
    """
    with quiet_import():
        from transformers.utils.quantization_config import GgufConfig
    # transformers draws a bar of its progress.
    with wrap_errors(f"transformers cannot read {path}"), redirect_stderr(io.StringIO()):
        model, loaded = model_class.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    _keep_blocks(path, model)
    return model, loaded


def gguf_tokenizer(path: Path) -> bytes:
    """Return the tokenizer of a GGUF file as a ``tokenizer.json``.

    Raises:
        OptionError: ``transformers`` cannot read it.
    """
    vocabulary = read_gguf_config(path).get_text_config(decoder=True).vocab_size
    with wrap_errors(f"transformers cannot read the tokenizer of {path}"):
        tokenizer = transformers().AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        document = json.loads(tokenizer.backend_tokenizer.to_str())
    # transformers adds the end token of GPT-2 to tokenizers of bytes, behind those of the file.
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < vocabulary]
    return json.dumps(document, indent=1).encode()


def _keep_blocks(path: Path, model: nn.Module) -> None:
    """Replace the weights of a model by the blocks of the file that they come from."""
    library = import_optional("gguf")
    sources: dict[bytes, tuple[Sequence[bytes], Callable[[], GroupedIntegers]]] = {}
    quantized = 0
    for tensor in library.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        quantized += kind not in _FLOATS
        read = _reader(kind, tensor)
        if read is not None:
            rows = _digests(library.dequantize(tensor.data, tensor.tensor_type))
            sources[_key(rows)] = rows, read
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() != 2:
                continue
            rows = _digests(weight.detach().numpy())
            if (source := sources.get(_key(rows))) is not None:
                if id(weight) not in replacements:
                    stored = StoredWeight(_source(rows, *source), weight.shape)
                    replacements[id(weight)] = nn.Parameter(stored, requires_grad=False)
                setattr(module, name, replacements[id(weight)])
    warn_of_floats(quantized, replacements.values(), "Core ML has no form for them")


def _digests(matrix: NDArray[np.float32]) -> list[bytes]:
    """Return a digest of each row."""
    rows = np.ascontiguousarray(matrix)
    return [blake2b(row, digest_size=16).digest() for row in rows]


def _key(rows: Sequence[bytes]) -> bytes:
    """Return a digest of rows in any order."""
    return blake2b(b"".join(sorted(rows)), digest_size=16).digest()


def _source(
    rows: Sequence[bytes], stored: Sequence[bytes], read: Callable[[], GroupedIntegers]
) -> QuantizedSource:
    """Return a source with the rows of a weight, which the file may store in another order."""
    if list(rows) == list(stored):
        return QuantizedSource(read)
    positions = {digest: row for row, digest in enumerate(stored)}
    return QuantizedSource(partial(_in_order, read, [positions[digest] for digest in rows]))


def _in_order(read: Callable[[], GroupedIntegers], order: Sequence[int]) -> GroupedIntegers:
    grouped = read()
    zeros = grouped.zero_point
    return GroupedIntegers(
        grouped.integers[order],
        grouped.scale[order],
        None if zeros is None else zeros[order],
        grouped.bits,
    )


def _reader(kind: str, tensor: Any) -> Callable[[], GroupedIntegers] | None:
    """Return a function that reads the integers of a matrix; None for blocks without integers."""
    if len(tensor.shape) != 2:
        return None
    if kind in _BLOCKS:
        return partial(_read_blocks, tensor, *_BLOCKS[kind])
    return partial(_read_super_blocks, tensor, kind.lower()) if kind in _SUPER_BLOCKS else None


_GROUP = 32  # weights in a block
_BLOCKS = {"Q4_0": (4, False), "Q4_1": (4, True), "Q5_0": (5, False), "Q5_1": (5, True)} | {
    "Q8_0": (8, False)
}
"""Bits, and whether a least value follows the scale, of blocks with one scale in fp16."""

_SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")
"""Blocks of 256 weights that ExecuTorch reads."""


def _read_blocks(tensor: Any, bits: int, has_least: bool) -> GroupedIntegers:
    library = import_optional("gguf")
    values = torch.from_numpy(library.dequantize(tensor.data, tensor.tensor_type))
    (outputs, inputs), groups = values.shape, values.shape[1] // _GROUP
    heads = tensor.data.reshape(outputs, groups, -1)[..., : 4 if has_least else 2]
    numbers = torch.from_numpy(np.ascontiguousarray(heads).view(np.float16).astype(np.float32))
    scale, middle = numbers[..., 0], 2 ** (bits - 1)
    divisor = torch.where(scale == 0, 1, scale)
    least = numbers[..., 1] if has_least else -middle * scale
    blocks = values.reshape(outputs, groups, _GROUP)
    integers = ((blocks - least[..., None]) / divisor[..., None]).round() - middle
    return GroupedIntegers(
        integers.reshape(outputs, inputs).to(torch.int8),
        divisor if has_least else scale,
        -least / divisor - middle if has_least else None,
        bits,
    )


def _read_super_blocks(tensor: Any, kind: str) -> GroupedIntegers:
    with quiet_import():
        from executorch.extension.llm.export.gguf import ExportableGGUFTensor
    raw = torch.from_numpy(np.array(tensor.data))
    blocks: Any = ExportableGGUFTensor.from_raw(raw, kind)
    values = blocks.to_intx_unpacked_to_int8_tensor(scale_dtype=torch.float32)
    integers, scale, zeros = values.qdata, values.scale, values.zero_point
    is_flat = scale == 0
    if zeros.is_floating_point() and is_flat.any():
        # All weights of such a group are its least value, which no zero point times 0 gives.
        library = import_optional("gguf")
        matrix = torch.from_numpy(library.dequantize(tensor.data, tensor.tensor_type))
        zeros = torch.where(is_flat, -matrix.reshape(*scale.shape, -1)[..., 0], zeros)
        groups = integers.reshape(*scale.shape, -1)
        integers = torch.where(is_flat[..., None], 0, groups).reshape(integers.shape)
        scale = torch.where(is_flat, 1, scale)
    return GroupedIntegers(integers, scale, zeros if zeros.any() else None, int(kind[1]))
