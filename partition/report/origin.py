"""Where in the user's model a node comes from."""

from __future__ import annotations

import re
import site
import sysconfig
from collections.abc import Iterator
from functools import cache

from torch.fx import Node

from coreml_delegate.partition.report.records import SourceLine

_FRAME = re.compile(
    r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n?(?P<code>.*)', re.MULTILINE
)


def source_of(node: Node) -> SourceLine | None:
    """The innermost line of the user's own code in the stack that ``torch.export`` recorded.

    Installed packages and the standard library are not the user's; where nothing else is in the
    stack, as in a model of torchvision's, the innermost line that is not torch's own counts.
    """
    frames = list(_frames(str(node.meta.get("stack_trace") or "")))
    own = [frame for frame in frames if not frame.file.startswith(_installed())]
    rest = [frame for frame in frames if "/torch/" not in frame.file.replace("\\", "/")]
    return next((found[-1] for found in (own, rest, frames) if found), None)


def _frames(trace: str) -> Iterator[SourceLine]:
    for match in _FRAME.finditer(trace):
        yield SourceLine(
            match["file"], int(match["line"]), match["function"].strip(), match["code"].strip()
        )


@cache
def _installed() -> tuple[str, ...]:
    """Folders of installed packages and of the standard library."""
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(sorted({*folders, *site.getsitepackages(), site.getusersitepackages()}))
