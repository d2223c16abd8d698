"""The blocks of the documentation's pages, and how they are run as a reader would run them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from coreml_delegate.scripts.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIRST = DOCS / "index.md"
COMMAND = "coreml-delegate"

RUN = ("python", "sh")
"""Languages of blocks that are run."""

SHOWN = ("text", "json", "cmake", "toml")
"""Languages of blocks that are read: what a program prints, or files."""

WRITTEN = ("jax-support.md", "op-support.md", "regressions.md")
"""Pages of ``docs/`` that commands write."""

REASONS = (
    "another test runs it",
    "installs packages",
    "needs a device",
    "needs a Mac",
    "needs a program of others",
    "runs for minutes",
)
"""What may keep a block from being run, after ``<!-- not run:``."""

_COMMENT = re.compile(r"<!-- (not run|exit code|not compared): (.+?) -->\s*")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The file.
        line: Number of its first line.
        language: As the fence says.
        title: Name of the file whose content it is, or None.
        text: The content.
        remarks: What the comment before it says, by kind.
        output: The block right behind it, if that shows what it prints.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    remarks: Mapping[str, str]
    output: Block | None = None

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_followed(self) -> bool:
        """Whether it is run or saved."""
        return "not run" not in self.remarks and (self.language in RUN or self.title is not None)


def pages() -> list[Path]:
    """README and the pages of ``docs/`` that people write, decisions apart."""
    written = sorted(page for page in DOCS.glob("*.md") if page.name not in WRITTEN)
    return [ROOT / "README.md", *written]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    tokens = MarkdownIt("commonmark").parse(page.read_text("utf-8"))
    found: list[Block] = []
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.type == "fence":
            output = None
            if after is not None and after.type == "fence" and _language(after) == "text":
                output = _block(page, after, None)
            found.append(_block(page, token, before, output))
    return found


def _block(page: Path, token: Token, before: Token | None, output: Block | None = None) -> Block:
    comment = None
    if before is not None and before.type == "html_block":
        comment = _COMMENT.fullmatch(before.content)
    title = re.search(r'title="(.+?)"', token.info)
    return Block(
        page,
        (token.map or [0])[0] + 1,
        _language(token),
        title and title[1],
        token.content,
        {comment[1]: comment[2]} if comment else {},
        output,
    )


def _language(token: Token) -> str:
    return token.info.partition(" ")[0]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@dataclass
class Reader:
    """Someone who follows a page from its beginning, in a folder of its own.

    Attributes:
        folder: The current folder.
        smaller: What is given to commands in place of other models.
        names: What Python blocks have defined.
    """

    folder: Path
    smaller: Mapping[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def follow(self, block: Block) -> str:
        """Do what a block says; return what it prints.

        Raises:
            AssertionError: A command ends with another exit code than the page says.
        """
        if block.title is not None:
            (self.folder / block.title).write_text(block.text, "utf-8")
            return ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if block.language == "python":
                # With empty lines before it, for tracebacks that name the page's lines.
                text = "\n" * block.line + block.text
                exec(compile(text, block.page, "exec"), self.names)
            else:
                self._enter(block, printed)
        return printed.getvalue()

    def _enter(self, block: Block, printed: io.StringIO) -> None:
        *before, last = commands(block)
        for words in (*before, last):
            expected = int(block.remarks.get("exit code", 0)) if words is last else 0
            program, *arguments = words
            assert program == COMMAND, f"{block.place}: {program} is not run; say why"
            try:
                code = main([self.smaller.get(argument, argument) for argument in arguments])
            except SystemExit as end:
                code = end.code
            assert code == expected, f"{block.place}: {shlex.join(words)}\n{printed.getvalue()}"


def _model_file() -> str:
    (found,) = (block.text for block in blocks(FIRST) if block.title == "model.py")
    return found


@contextlib.contextmanager
def reading(folder: Path, smaller: Mapping[str, str] | None = None) -> Iterator[Reader]:
    """A reader in an empty folder, who has saved ``model.py`` of the first page."""
    (folder / "model.py").write_text(_model_file(), "utf-8")
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            yield Reader(folder, smaller or {})
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - set(before):
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder):
                del sys.modules[name]


def missing(printed: str, shown: str) -> list[str]:
    """The lines of a page's output that were not printed, in this order.

    Numbers and the widths of columns may differ from run to run; ``...`` stands for anything.
    """
    left = [_comparable(line) for line in printed.splitlines()]
    absent: list[str] = []
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        wanted = ".*".join(re.escape(part) for part in _comparable(line).split("..."))
        found = next((n for n, got in enumerate(left) if re.fullmatch(wanted, got)), None)
        if found is None:
            absent.append(line)
        else:
            del left[: found + 1]
    return absent


def _comparable(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())
