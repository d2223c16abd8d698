"""``coreml-delegate extract``: write the models inside the delegates of a ``.pte``.

With an ``.mlpackage`` as output, the only delegate becomes the model of an app.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.files import new_folder
from coreml_delegate.scripts import arguments, console, interruption, model_packages
from coreml_delegate.scripts.commands import Command

if TYPE_CHECKING:
    from coreml_delegate.options.model_interface import ModelInterface
    from coreml_delegate.scripts.delegates import BlobModel, CoreMLPartition


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="FILE.pte")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to (default: FILE_coreml, next to FILE.pte), or an .mlpackage: the "
        "whole program as one model for an app",
    )
    model_packages.add_interface(parser)
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.runtime.program.pte import PteProgram
    from coreml_delegate.scripts.delegates import all_partitions, models_of

    path: Path = args.program
    interface = model_packages.interface_of(args, args.output)
    if model_packages.is_package(args.output):
        return _write_package(args, interface)
    folder: Path = args.output or path.with_name(f"{path.stem}_coreml")
    planned: dict[Path, tuple[BlobModel, list[str]]] = {}
    for users in _group_by_blob(all_partitions(PteProgram.open(path))):
        for model in models_of(users[0].blob):
            name = re.sub(r"[^\w.-]", "_", users[0].name)
            target = folder / f"{name}{model.suffix}"
            planned[target] = (model, [_describe(user) for user in users])
    _check_targets(folder, planned, force=args.force)
    with ExitStack() as folders:
        for target, (model, _) in planned.items():
            interruption.check()
            folders.enter_context(
                new_folder(model.files, target, folders=model.empty_folders, overwrite=args.force)
            )
        interruption.check()
    _print(planned, as_json=args.json)
    return 0


def _write_package(args: argparse.Namespace, interface: ModelInterface) -> int:
    """Write the whole program as one model."""
    from coreml_delegate.partition.package import package_files

    arguments.check_output(args.output, force=args.force, is_folder=True)
    files = package_files(args.program, interface)
    with arguments.new_package(files, args.output, force=args.force):
        pass
    count = sum(map(len, files.values()))
    if args.json:
        console.write_json([{"path": str(args.output), "bytes": count}])
    else:
        console.write(console.columns([(args.output, console.size(count))]))
    return 0


def _group_by_blob(partitions: list[CoreMLPartition]) -> list[list[CoreMLPartition]]:
    """Group partitions whose blobs have equal bytes."""
    groups: dict[bytes, list[CoreMLPartition]] = {}
    for partition in partitions:
        groups.setdefault(hashlib.sha256(partition.blob).digest(), []).append(partition)
    return list(groups.values())


def _check_targets(folder: Path, targets: Iterable[Path], *, force: bool) -> None:
    """Check all targets before the first is written, so that an error leaves nothing behind."""
    if folder.exists() and not folder.is_dir():
        raise ProgramError("output is not a folder", got=str(folder))
    for target in targets:
        if target.exists() and not force:
            raise ProgramError(
                "output exists", got=str(target), remedy="Pass --force to replace it"
            )


def _describe(partition: CoreMLPartition) -> str:
    function = partition.reference.function_name if partition.reference else None
    return f"{partition.name} (function {function})" if function else partition.name


def _print(planned: dict[Path, tuple[BlobModel, list[str]]], *, as_json: bool) -> None:
    rows = [
        (path, sum(data.nbytes for data in model.files.values()), users)
        for path, (model, users) in planned.items()
    ]
    if as_json:
        console.write_json(
            [{"path": str(p), "bytes": count, "delegates": users} for p, count, users in rows]
        )
        return
    console.write(
        console.columns((p, console.size(count), ", ".join(users)) for p, count, users in rows)
    )


COMMAND = Command(
    name="extract",
    summary="write the mlpackages inside a .pte to folders",
    description="Write the model of every Core ML delegate of a .pte to a folder "
    "METHOD_INDEX.mlpackage (.mlmodelc if it was compiled ahead of time). Delegates that share "
    "one model give one folder, named after the first of them. With an .mlpackage as output, write "
    "the whole program as one model, as export does.",
    add_arguments=add_arguments,
    run=run,
)
