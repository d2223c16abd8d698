"""Programs are the same in every process, though models go through sets of texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Prints the operations of both methods of an architecture.
_EXPORT = """
import sys
from llm.test_families import CHUNK, CONTEXT, model
from support.checkpoints import CONFIG
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods
from coreml_delegate.llm.layout import CacheKind, Layout
layout = Layout(CONFIG["vocab_size"], CONTEXT, CHUNK, CacheKind.IO)
for program in export_methods(Decoder(model(sys.argv[1]), context=CONTEXT), layout).values():
    print(program.graph_module.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "mellum", "exaone_moe"])
def test_the_hash_seed_changes_no_program(name):
    """Masks and rotations of types of layers are made in the order of a set of texts."""
    seeds = ("0", "1")  # which give the sets of two types of layers different orders
    made = [
        subprocess.run(
            [sys.executable, "-c", _EXPORT, name],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in seeds
    ]
    orders = [
        subprocess.run(
            [sys.executable, "-c", "print(*{'full_attention', 'sliding_attention'})"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in seeds
    ]
    assert orders[0] != orders[1]
    assert made[0]
    assert made[0] == made[1]
