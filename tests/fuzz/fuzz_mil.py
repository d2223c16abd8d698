"""Coverage-guided fuzzing of the MIL reader and an engine.

Usage: ``python -m tests.fuzz.fuzz_mil [--engine ENGINE] [CORPUS ...] [libFuzzer options]``.
A crash, a hang and an exception that is not ours are findings: libFuzzer writes the input to a file
``crash-*``, which belongs into ``corpus/`` once its cause is mended.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["coreml_delegate"]):
    from support.damage import CORPUS, MAX_TURNS, damage, execute

    from coreml_delegate.runtime.engines import limits


def main() -> None:
    """Fuzz until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="reference")
    options, rest = parser.parse_known_args()
    limits.MAX_TURNS = MAX_TURNS
    warnings.simplefilter("ignore")

    def test(data: bytes) -> None:
        execute(data, options.engine)

    atheris.Setup([sys.argv[0], *(rest or [str(CORPUS)])], test, custom_mutator=mutate)
    atheris.Fuzz()


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Damage fields, as long as the specification parses; bytes, otherwise or now and then."""
    source = random.Random(seed)
    if source.random() < 0.9:
        try:
            return damage(bytes(data), source.randrange, times=source.randint(1, 3))[:max_size]
        except Exception:  # noqa: BLE001 - bytes that are no message have no fields
            pass
    return atheris.Mutate(data, max_size)


if __name__ == "__main__":
    main()
