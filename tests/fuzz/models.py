"""Random models by the thousand, lowered and compared with eager PyTorch, the same for a seed.

Usage: ``python -m tests.fuzz.models [--count N] [--seed SEED] [--precision float16]``. Prints each
model whose numbers differ, on an engine or, since lowering may not change a model, in PyTorch
afterwards, and each that cannot be lowered or run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.lowering import PRECISIONS
from support.random_models import draw_chain, wrong

from coreml_delegate.options.compile_specs import Precision

_TOGETHER = 12


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, lower and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", type=Precision, choices=PRECISIONS, default="float32")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = 0
    for first in range(0, options.count, _TOGETHER):
        source = random.Random(f"{options.seed} {first}")
        sys.stderr.write(f"\r{first}")
        for text in wrong([draw_chain(source) for _ in range(_TOGETHER)], options.precision):
            found += 1
            sys.stdout.write(f"\r{text}\n")
    sys.stderr.write("\n")
    sys.stdout.write(f"{options.count} models, {found} differences\n")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
