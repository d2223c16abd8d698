"""Every command without an optional package: it runs, or names the extra that it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llm.test_audio import write
from support.checkpoints import tiny_model
from support.command import MODELS
from support.gguf_files import TOKENS, write_gguf

from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE
from coreml_delegate.scripts.cli import COMMANDS

_EXTRAS = {
    "cluster": ("dask", "distributed"),
    "grammar": ("llguidance",),
    "gguf": ("gguf",),  # transformers finds accelerate by its metadata, which stay visible
    "jax": ("jax", "jaxlib"),
    "llm": ("safetensors", "tokenizers", "transformers"),
    "timm": ("timm",),  # the extra installs those of [vision] too
    "vision": ("PIL", "torchvision"),
}
"""Packages that only each extra installs."""

_LINES = (
    (f"export {MODELS}:tiny -o tiny.pte", ()),
    ("inspect tiny.pte", ()),
    ("extract tiny.pte -o packages", ()),
    ("run tiny.pte", ()),
    ("run tiny.pte --input photo.png", ("vision",)),
    (f"verify {MODELS}:tiny tiny.pte", ()),
    ("export timm:test_vit -o vit.pte", ("timm", "vision")),
    ("check tiny.pte", ()),
    ("trace tiny.pte", ()),
    ("profile tiny.pte --repeat 2", ()),
    ("record tiny.pte -o tiny.cmlrun", ()),
    ("replay tiny.cmlrun tiny.pte", ()),
    ("compile tiny.pte", ()),
    ("cache --clear", ()),
    (f"quantize-report {MODELS}:tiny --quantize int8-weight", ()),
    ("convert add.mlir -o add.mlpackage", ("jax",)),
    ("export-llm --random llama.json --context 32 -o llm.pte", ("llm",)),
    ("export-llm tiny.gguf --context 32 -o gguf.pte", ("gguf", "llm")),
    ("export-embedding --random bert.json --pooling mean -o bert.pte", ("llm",)),
    ("export-speech --random parakeet.json --seconds 0.2 -o speech.pte", ("llm",)),
    ("transcribe speech.pte silence.wav", ("llm",)),
    ("generate llm.pte --prompt 1,2 --max-new-tokens 2", ("llm",)),
    ("generate llm.pte --prompt 1,2 --max-new-tokens 2 --json-object", ("grammar", "llm")),
    ("evaluate llm.pte --text add.mlir --max-windows 1", ("llm",)),
    ("sweep sweep.toml --workers 1 -o swept", ("cluster",)),
    ("demo -o demo --repeat 1", ("vision",)),
)
"""Command lines, in the order in which they run, with the extras that each needs."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,  # tokens are bytes
}

_BERT = {
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "model_type": "bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}

_PARAKEET = {
    "encoder_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "model_type": "parakeet_encoder",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
    },
    "model_type": "parakeet_ctc",
    "pad_token_id": 256,
    "vocab_size": 257,
}

_FILES = {
    "parakeet.json": json.dumps(_PARAKEET),
    "llama.json": json.dumps(_LLAMA),
    "bert.json": json.dumps(_BERT),
    "add.mlir": "func.func public @main(%a: tensor<3xf32>) -> tensor<3xf32> {\n"
    "  %0 = stablehlo.add %a, %a : tensor<3xf32>\n  return %0 : tensor<3xf32>\n}\n",
    "sweep.toml": f'[models.tiny]\nsource = "{MODELS}:tiny"\n[options]\nprecision = ["float32"]\n',
}

_CHILD = """
import contextlib, io, json, sys, traceback
from importlib.machinery import PathFinder

hidden = frozenset(sys.argv[1].split(","))


# Finders of our own ask this one, too.
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: (
    None if name.partition(".")[0] in hidden else find_spec(name, *more)
)
from coreml_delegate.scripts.cli import main

for line in json.loads(sys.argv[2]):
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            code = main(line.split())
    except BaseException:
        code, told = None, io.StringIO(traceback.format_exc())
    print(json.dumps((code, told.getvalue())), flush=True)
"""


def _photo(path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (16, 16), (200, 100, 50)).save(path)


def test_every_command_is_tried() -> None:
    assert {line.split()[0] for line, _ in _LINES} == {command.name for command in COMMANDS}


def test_commands_without_any_extra_name_it(tmp_path: Path) -> None:
    """The packages of ``pip install coreml-delegate``."""
    needy = [(line, extras) for line, extras in _LINES if extras and "tiny.pte" not in line]
    _try(tmp_path, needy, tuple(_EXTRAS))


@pytest.mark.slow
@pytest.mark.parametrize("extra", _EXTRAS)
def test_a_command_without_an_extra_runs_or_names_it(tmp_path: Path, extra: str) -> None:
    _try(tmp_path, _LINES, (extra,))


@pytest.mark.slow
def test_a_command_without_any_extra_runs_or_names_it(tmp_path: Path) -> None:
    _try(tmp_path, _LINES, tuple(_EXTRAS))


def _try(tmp_path: Path, lines: Sequence[tuple[str, Sequence[str]]], extras: Sequence[str]) -> None:
    for name, content in _FILES.items():
        (tmp_path / name).write_text(content)
    _photo(tmp_path / "photo.png")
    model = tiny_model("llama", vocab_size=TOKENS, intermediate_size=64)
    write_gguf(tmp_path / "tiny.gguf", model, "Q8_0")
    write(tmp_path / "silence.wav", np.zeros(1600))
    hidden = ",".join(package for extra in extras for package in _EXTRAS[extra])
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, hidden, json.dumps([line for line, _ in lines])],
        cwd=tmp_path,
        env={
            **os.environ,
            "COREML_DELEGATE_CACHE": str(tmp_path / "cache"),
            LIMIT_VARIABLE: "1G",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in child.stdout.splitlines()]
    wrong = [
        f"{line}: exit code {code}, {told}"
        for (line, needed), (code, told) in zip(lines, results, strict=True)
        if not _is_right(code, told, set(needed) & set(extras))
    ]
    assert not wrong, "\n".join(wrong)


def _is_right(code: int | None, told: str, missing: set[str]) -> bool:
    if not missing:
        return code == 0
    if re.search(r"(llm|speech)\.pte \(No such file or directory\), expected a \.pte file$", told):
        return code == 1  # no earlier command could write it
    named = re.search(r"pip install 'coreml-delegate\[(\w+)\]'", told)
    return code == 1 and named is not None and named[1] in missing
