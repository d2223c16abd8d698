"""The source line of a node in the user's model."""

from __future__ import annotations

import re
import site
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(
    r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n?(?P<code>.*)', re.MULTILINE
)
# Of this Python, or of another Python that exported the program.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's model.

    Attributes:
        file: File name as in tracebacks.
        line: Line number from 1.
        function: Name of the function around it.
        code: Text of the line, empty if unknown.
    """

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"


def source_of(node: Node) -> SourceLine | None:
    """Return the innermost line of the user's code in a node's recorded stack.

    Installed packages and the standard library are not the user's code. If the stack has nothing
    else, as for a torchvision model, the innermost line outside torch is returned.

    Source: ``stack_trace``, which ``torch.export`` records.
    """
    frames = list(_frames(str(node.meta.get("stack_trace") or "")))
    own = [frame for frame in frames if not _is_installed(frame.file)]
    outside_torch = [f for f in frames if "/torch/" not in f.file.replace("\\", "/")]
    return next((listed[-1] for listed in (own, outside_torch, frames) if listed), None)


def _frames(trace: str) -> Iterator[SourceLine]:
    for match in _FRAME.finditer(trace):
        yield SourceLine(
            match["file"], int(match["line"]), match["function"].strip(), match["code"].strip()
        )


def _is_installed(file: str) -> bool:
    return file.startswith(_installed_folders()) or _INSTALLED.search(file) is not None


@cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, of the standard library and of torch."""
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(torch.__file__).parent))  # torch may be a build in another folder
    return tuple(sorted({*folders, *site.getsitepackages(), site.getusersitepackages()}))
