"""``python -m coreml_delegate.scripts``: the ``coreml-delegate`` command."""

from __future__ import annotations

import sys

from coreml_delegate.scripts import console


def main() -> int:
    """Run the command line; a signal during its imports ends as quietly as later.

    Raises:
        SystemExit: Wrong usage, help or version was asked for, or a signal to terminate arrived.
    """
    return console.until_interrupted(_run)


def _run() -> int:
    from coreml_delegate.scripts import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
