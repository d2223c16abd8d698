"""``python -m coreml_delegate.scripts``: the ``coreml-delegate`` command."""

from __future__ import annotations

import sys

from coreml_delegate.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main())
