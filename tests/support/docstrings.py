"""A language model trained here, byte by byte, on the standard library's documentation strings."""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.llm.checkpoint import random_decoder
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.patches.third_party import transformers

END = 0
"""The byte that ends a text."""

CONTEXT = 128
_HELD_OUT = 8  # one in so many strings is not trained on
_BATCH, _LENGTH = 16, 64


def untrained(width: int = 96, layers: int = 2) -> Decoder:
    """The model before training, the same every time."""
    config = transformers().AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
    )
    return random_decoder(config, 0, context=CONTEXT)


@functools.cache
def texts() -> tuple[bytes, bytes]:
    """Documentation strings for training and for testing, each ended by ``END``."""
    library = Path(sysconfig.get_path("stdlib"))
    strings = [text for path in sorted(library.glob("*.py")) for text in _docstrings(path)]
    parts = ([], [])
    for index, text in enumerate(strings):
        parts[index % _HELD_OUT == 0].append(text.encode() + bytes([END]))
    train, held_out = (b"".join(part) for part in parts)
    return train, held_out


def _docstrings(path: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)
    ]
    return [inspect.cleandoc(text) for node in nodes if (text := ast.get_docstring(node))]


@functools.cache
def trained(
    steps: int = 160, width: int = 96, layers: int = 2, *, length: int = _LENGTH
) -> Decoder:
    """The model after training, the same every time; not to be modified.

    Args:
        steps: Number of batches.
        width: Width of the model.
        layers: Number of layers.
        length: Tokens of each text of a batch.
    """
    decoder = untrained(width, layers).requires_grad_(True)
    with torch.no_grad():
        for linear in (m for m in decoder.model.model.modules() if isinstance(m, nn.Linear)):
            linear.weight.mul_(5)  # random weights are made for wider models
    data = torch.frombuffer(bytearray(texts()[0]), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(decoder.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.1
    )
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (_BATCH,), generator=random)
        rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = functional.cross_entropy(decoder(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return decoder.eval().requires_grad_(False)


def held_out_rows(count: int, length: int = CONTEXT) -> torch.Tensor:
    """Pieces of unseen text: [count, length], int64."""
    data = torch.frombuffer(bytearray(texts()[1]), dtype=torch.uint8).long()
    starts = torch.linspace(0, len(data) - length, count).long().tolist()
    return torch.stack([data[start : start + length] for start in starts])


@torch.no_grad()
def perplexity(logits: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the perplexity of ``rows`` [N, L] after the first token; logits [N, L - 1, V]."""
    return float(functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).exp())
