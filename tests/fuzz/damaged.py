"""Damaged programs by the thousand, the same ones for a seed.

Usage: ``python -m tests.fuzz.damaged [--engine ENGINE] [--count N] [--seed SEED]``. Each is a
program of the corpus with one to three fields damaged. It runs, or is refused with an error of
ours. Four of five are refused where they are read; the others are counted. A crash, a program that
takes a minute and any other exception end this, after the number of the program, for ``--first``.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.damage import CORPUS, MAX_TURNS, NATIVE, damage, execute

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_SECONDS = 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Damage, run and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    engines = (REFERENCE.name, OPENVINO.name, NATIVE)
    parser.add_argument("--engine", choices=engines, default=REFERENCE.name)
    parser.add_argument("--count", type=int, default=10_000, help="programs that are read")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    limits.MAX_TURNS = MAX_TURNS
    warnings.simplefilter("ignore")
    samples = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    outcomes: Counter[str] = Counter()
    number, read = options.first, 0
    while read < options.count:
        source = random.Random(f"{options.seed} {number}")
        sample = damage(source.choice(samples), source.randrange, times=source.randint(1, 3))
        sys.stderr.write(f"\r{number}")
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        errors = execute(sample, options.engine)
        outcomes[type(errors[0]).__name__ if errors else "ran"] += 1
        read += not errors or not isinstance(errors[0], BlobFormatError)
        number += 1
    faulthandler.cancel_dump_traceback_later()
    sys.stderr.write("\n")
    lines = [f"{options.engine}, seed {options.seed}: {outcomes.total()} programs, {read} read"]
    lines += [f"{count:7} {outcome}" for outcome, count in outcomes.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
