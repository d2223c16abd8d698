"""``coreml-delegate cache``: show or clear the compiled programs on this machine."""

from __future__ import annotations

import argparse

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--clear", action="store_true", help="remove every entry")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.runtime.engines.entry_cache import CacheOptions, EntryCache

    configured = CacheOptions.from_environment()
    # Switched off, it may still hold entries of before.
    options = CacheOptions() if configured is None else configured
    cache = EntryCache(options)
    removed = cache.clear() if args.clear else 0
    files = cache.files()
    summary = {
        "folder": str(options.folder),
        "enabled": configured is not None,
        "limit_bytes": options.limit_bytes,
        "entries": len(files),
        "bytes": sum(file.size for file in files),
        "removed": removed,
    }
    if args.json:
        console.write_json(summary)
        return 0
    limit = f"at most {console.size(options.limit_bytes)}" if configured is not None else "off"
    rows = [
        ("folder", options.folder),
        ("limit", limit),
        ("entries", len(files)),
        ("size", console.size(sum(file.size for file in files))),
    ]
    if args.clear:
        rows.append(("removed", removed))
    console.write(console.columns(rows))
    return 0


COMMAND = Command(
    name="cache",
    summary="show or clear the cache of compiled programs",
    description="Show where the programs compiled for this machine are kept and how much space "
    "they take; with --clear, remove them.",
    add_arguments=add_arguments,
    run=run,
)
