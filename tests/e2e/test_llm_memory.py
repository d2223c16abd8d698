"""Peak memory of exporting a language model, relative to its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
LIMIT = 2.5
"""Multiple of the fp32 weights: the decoder, both methods in fp16, and what allocators keep."""

EXPORT = """
import sys
from benchmarks.footprint import resident
from coreml_delegate.scripts.cli import main

def export(config):
    assert main(["export-llm", "--random", config, "-o", config + ".pte", "--context", "64"]) == 0

export(sys.argv[1])  # imports, which do not count
before = resident(reset=True)
export(sys.argv[2])
sys.stdout.write(str(resident() - before))
"""


def config(path: Path, width: int, vocabulary: int) -> Path:
    settings = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.slow
def test_peak_memory_of_export(tmp_path: Path) -> None:
    small, large = config(tmp_path / "small", 64, 256), config(tmp_path / "large", 1024, 16384)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXPORT, str(small), str(large)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": str(_TESTS), "COREML_DELEGATE_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    weights = 4 * (16384 * 1024 + 2 * 1024 * (3 * 1024 + 3 * 4096))
    assert 0 < int(done.stdout.splitlines()[-1]) < LIMIT * weights
