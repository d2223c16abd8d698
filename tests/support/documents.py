"""The blocks of the documentation's pages, run as a reader would run them."""

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

NOT_RUN = ("text", "json", "cmake", "toml", "swift", "yaml")
"""Languages of blocks that are read: what a program prints, or files."""

GENERATED = ("jax-support.md", "op-support.md", "regressions.md")
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
        language: Language of the fence.
        title: Name of the file whose content it is, or None.
        text: The content.
        remarks: Content of the comment before it, by kind.
        output: The block right after it, if that shows its output.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    remarks: Mapping[str, str]
    output: Block | None = None

    @property
    def location(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_followed(self) -> bool:
        """Whether it is run or saved."""
        return "not run" not in self.remarks and (self.language in RUN or self.title is not None)


def pages() -> list[Path]:
    """README and the hand-written pages of ``docs/``, except decisions."""
    hand_written = sorted(page for page in DOCS.glob("*.md") if page.name not in GENERATED)
    return [ROOT / "README.md", *hand_written]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    tokens = MarkdownIt("commonmark").parse(page.read_text("utf-8"))
    result: list[Block] = []
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.type == "fence":
            output = None
            if after is not None and after.type == "fence" and _language(after) == "text":
                output = _block(page, after, None)
            result.append(_block(page, token, before, output))
    return result


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
    """A reader who follows a page from its beginning, in a separate folder.

    Attributes:
        folder: The current folder.
        smaller: Small models in place of the models that commands name.
        names: Names that Python blocks have defined.
    """

    folder: Path
    smaller: Mapping[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def follow(self, block: Block) -> str:
        """Run a block; return its output.

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
            assert program == COMMAND, f"{block.location}: {program} is not run; say why"
            try:
                code = main([self.smaller.get(argument, argument) for argument in arguments])
            except SystemExit as end:
                code = end.code
            assert code == expected, f"{block.location}: {shlex.join(words)}\n{printed.getvalue()}"


def _model_file() -> str:
    (content,) = (block.text for block in blocks(FIRST) if block.title == "model.py")
    return content


@contextlib.contextmanager
def reading(folder: Path, smaller: Mapping[str, str] | None = None) -> Iterator[Reader]:
    """A reader in an empty folder with the first page's ``model.py``."""
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


def missing(printed: str, expected: str) -> list[str]:
    """The lines of a page's output that were not printed in this order.

    Numbers and the widths of columns may differ from run to run; ``...`` stands for anything.
    """
    remaining = [_comparable(line) for line in printed.splitlines()]
    absent: list[str] = []
    for line in expected.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part) for part in _comparable(line).split("..."))
        index = next((n for n, got in enumerate(remaining) if re.fullmatch(pattern, got)), None)
        if index is None:
            absent.append(line)
        else:
            del remaining[: index + 1]
    return absent


def _comparable(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())
