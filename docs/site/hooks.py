"""MkDocs hooks: generated pages get their content and their place in the navigation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import command_reference
import decisions
import python_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[2]
_COMMANDS = "reference/commands.md"
_PYTHON = "reference/python/"
_DECISIONS = "adr/"


@event_priority(100)  # before mkdocstrings reads the sources' paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder in the folder's place in the navigation."""
    _lay_out_sources(config)
    pages = [_DECISIONS + page.name for page in decisions.pages()]
    folders = {
        _PYTHON: [f"{_PYTHON}index.md", *(f"{_PYTHON}{m}.md" for m in python_reference.MODULES)],
        _DECISIONS: [f"{_DECISIONS}index.md", *pages],
    }
    config.nav = [_with_pages(entry, folders) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    generated = {
        _COMMANDS: command_reference.page(),
        f"{_PYTHON}index.md": python_reference.index(),
        f"{_DECISIONS}index.md": decisions.index(),
    }
    generated |= {f"{_PYTHON}{m}.md": python_reference.page(m) for m in python_reference.MODULES}
    for address, content in generated.items():
        files.append(File.generated(config, address, content=content))
    return files


def _lay_out_sources(config: MkDocsConfig) -> None:
    """Copy the package and follow its links, because griffe, which reads it, does not follow links.

    The copy lies beside the site, because several may be built at the same time.
    """
    copy = Path(config.site_dir).parent / "site-sources"
    shutil.rmtree(copy, ignore_errors=True)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "coreml_delegate", copy / "coreml_delegate", ignore=skipped)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(copy)]


def _with_pages(entry: Any, folders: dict[str, list[str]]) -> Any:
    if isinstance(entry, str):
        return entry
    ((title, target),) = entry.items()
    if isinstance(target, list):
        return {title: [_with_pages(inner, folders) for inner in target]}
    return {title: folders.get(target, target)}
