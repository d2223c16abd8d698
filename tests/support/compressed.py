"""Models that torchao's ``quantize_`` compresses, and the stored sizes of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.weight_file import ALIGNMENT, read_record
from coreml_delegate.patches.third_party import coremltools, quiet_import

coremltools()
with quiet_import():
    from torchao.prototype.quantization.codebook_coreml import CodebookWeightOnlyConfig
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

__all__ = [
    "CodebookWeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MappingType",
    "PerAxis",
    "PerGroup",
    "compressed",
    "quantize_",
    "sizes_in",
    "stored_sizes",
    "tokens",
    "words",
]

ROWS, COLUMNS = 64, 128


def is_weight(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Embedding | nn.Linear)


def words() -> nn.Module:
    """An embedding and a linear layer, both of 64 x 128 weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS), nn.ReLU()).eval()


def tokens() -> tuple[torch.Tensor]:
    return (torch.tensor([0, 5, 63]),)


def compressed(config: Any, module: nn.Module | None = None, filter_fn: Any = is_weight) -> Any:
    """A module with the weights of its embeddings and linear layers compressed."""
    module = words() if module is None else module
    quantize_(module, config, filter_fn)
    return module


def stored_sizes(edge: Any) -> list[int]:
    """Bytes of every weight in the weight files of a program's delegates, the largest first.

    Read from the files, not from the programs' own declarations.
    """
    modules = edge.exported_program().graph_module
    sizes: list[int] = []
    for node in modules.graph.nodes:
        if node.op != "get_attr" or "lowered_module" not in str(node.target):
            continue
        for name, content in unflatten(getattr(modules, node.target).processed_bytes).items():
            if not name.endswith("weight.bin"):
                continue
            sizes += sizes_in(name, content)
    return sorted(sizes, reverse=True)


def sizes_in(name: str, content: Any) -> list[int]:
    """Bytes of every weight in a weight file."""
    sizes: list[int] = []
    offset = ALIGNMENT
    while offset < content.nbytes:
        record = read_record(name, content, offset)
        sizes.append(record.size)
        end = record.start + record.size
        offset = end + -end % ALIGNMENT
    return sizes
