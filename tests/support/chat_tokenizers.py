"""Tokenizer folders of chat models: a tiny byte-level BPE with control tokens, and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTROL = ("<s>", "</s>", "<|turn|>", "<|end|>")
TURNS = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Each turn between control tokens."""

FORGETTING = TURNS.replace("{{ m.content }}", "{{ m.content.split('|')[-1] }}")
"""Earlier answers lose what is before a bar, as thoughts are left out of later turns."""

REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    + TURNS
)
"""System messages are an error."""


def bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE trained on a few words, with control tokens after the other tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the words of the world user assistant"] * 4, trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def save(folder: Path, template: str | None = TURNS, **config: Any) -> Path:
    """Save a tokenizer as ``transformers`` does; returns the folder.

    Args:
        folder: Created if it does not exist.
        template: Content of ``chat_template.jinja``; None for no such file.
        config: Further keys of ``tokenizer_config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bpe().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
