"""``coreml-delegate cache``: show or clear the caches of conversions and compilations."""

from __future__ import annotations

import argparse
from typing import Any

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--clear", action="store_true", help="remove every entry")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.formats.caches import HOMELESS
    from coreml_delegate.formats.entry_cache import COMPILED, DEFAULT_LIMIT, CacheOptions
    from coreml_delegate.lowering.store import FOLDER
    from coreml_delegate.runtime import native_files

    configured = CacheOptions.from_environment()
    # Caches that are switched off may still hold earlier entries.
    limit = DEFAULT_LIMIT if configured is None else configured.limit_bytes
    folders = COMPILED, FOLDER, native_files.FOLDER
    compiled, converted, native = (_state(name, clear=args.clear) for name in folders)
    if args.json:
        common = {"enabled": configured is not None, "limit_bytes": limit}
        console.write_json({**common, **compiled, "conversions": converted, "native": native})
        return 0
    rows: list[tuple[str, object]] = [
        ("limit", f"at most {console.size(limit)} each" if configured is not None else "off")
    ]
    states = {"compiled programs": compiled, "conversions": converted, "without Python": native}
    for name, state in states.items():
        removed = f", {state['removed']} removed" if args.clear else ""
        entries = "1 entry" if state["entries"] == 1 else f"{state['entries']} entries"
        content = f"{entries}, {console.size(state['bytes'])}{removed}"
        rows += [(name, content), ("", state["folder"] or HOMELESS)]
    console.write(console.columns(rows))
    return 0


def _state(name: str, *, clear: bool) -> dict[str, Any]:
    """Return folder and size of a cache, after clearing it if ``clear``."""
    from coreml_delegate.formats.caches import cache_folder
    from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache

    caches = cache_folder()
    if caches is None:
        return {"folder": None, "entries": 0, "bytes": 0, "removed": 0}
    folder = caches / name
    cache = EntryCache(CacheOptions(folder))
    removed = cache.clear() if clear else 0
    files = cache.files()
    size = sum(file.size for file in files)
    return {"folder": str(folder), "entries": len(files), "bytes": size, "removed": removed}


COMMAND = Command(
    name="cache",
    summary="show or clear the caches of conversions and of compiled programs",
    description="Show the folders and sizes of the caches of converted partitions and compiled "
    "programs on this machine; with --clear, remove their entries.",
    add_arguments=add_arguments,
    run=run,
)
