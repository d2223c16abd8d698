"""A headless browser, if the machine has one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(_BROWSER is None, reason="no Chromium on this machine")


def rendered(page: Path, fragment: str = "", *options: str) -> str:
    """The document of a page after its scripts have run, without a network.

    Args:
        page: The file to open.
        fragment: Text after ``#`` in its address.
        *options: More options of the browser.
    """
    command = [
        str(_BROWSER),
        "--headless",
        "--disable-gpu",
        # Its own sandbox needs privileges that containers do not give; the page is ours.
        "--no-sandbox",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.parent / 'profile'}",
        *options,
        "--dump-dom",
        f"{page.as_uri()}#{fragment}",
    ]
    environment = os.environ | {"HOME": str(page.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return done.stdout
