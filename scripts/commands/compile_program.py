"""``coreml-delegate compile``: compile programs ahead of time, into the cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command

if TYPE_CHECKING:
    from coreml_delegate.formats.blob import Buffer
    from coreml_delegate.runtime.delegate import CoreMLDelegate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "programs", type=Path, nargs="+", metavar="PROGRAM", help=".pte or .mlpackage, or several"
    )
    arguments.add_engine(parser)
    arguments.add_data(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.formats.caches import HOMELESS, NAME_A_FOLDER, cache_folder
    from coreml_delegate.formats.entry_cache import CacheOptions

    if cache_folder() is None:
        raise OptionError("caches are off", got=HOMELESS, remedy=NAME_A_FOLDER)
    if CacheOptions.from_environment() is None:
        raise OptionError(
            "the cache of compiled programs is off",
            got="COREML_DELEGATE_COMPILED_CACHE=off",
            remedy="Unset the variable, or set it to a size such as 4G",
        )
    compiled = []
    for path in args.programs:
        start = time.perf_counter()
        with console.step(f"Compiling {path}"):
            parts = list(_compiled(path, args))
        seconds = time.perf_counter() - start
        compiled.append({"file": str(path), "seconds": seconds, "delegates": parts})
    if args.json:
        console.write_json({"programs": compiled})
    else:
        console.write("\n".join(line for program in compiled for line in _lines(program)))
    return 0


def _compiled(path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compile the Core ML parts of a program, for every method and shape; describe each."""
    from coreml_delegate import runtime
    from coreml_delegate.formats.mlpackage import map_package
    from coreml_delegate.runtime.delegate import CoreMLDelegate
    from coreml_delegate.runtime.loading import is_package
    from coreml_delegate.runtime.mil.reader import read_files
    from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID
    from coreml_delegate.scripts.program_arguments import engine_options

    options: dict[str, Any] = {"engine": args.engine, "options": engine_options(args)}
    if is_package(path):
        files = map_package(path)
        for name in read_files(files).functions:
            model = runtime.Model.from_files(files, function_name=name, **options)
            model.prepare_shapes()
            yield {"method": name, "delegate": None, "engine": model.engine_name}
        return
    program = runtime.load_program(path, data=args.data or None, host=args.host, **options)
    for method in program.method_names:
        infos = program.program.method(method).delegates
        own = [info for info in infos if info.backend_id == COREML_BACKEND_ID]
        delegates = [d for d in program.delegates(method) if isinstance(d, CoreMLDelegate)]
        for number, (info, delegate) in enumerate(zip(own, delegates, strict=True)):
            delegate.model.prepare_shapes()
            yield {
                "method": method,
                "delegate": number,
                "engine": delegate.model.engine_name,
                "python_reason": delegate.python_reason,
                "application_reason": _write_native(delegate, method, info.processed),
            }


def _write_native(delegate: CoreMLDelegate, method: str, processed: Buffer) -> str | None:
    """Write the file for applications without Python; return why that is not possible, or None."""
    from coreml_delegate.formats.entry_cache import CacheOptions
    from coreml_delegate.runtime import native_files

    obstacle = delegate.model.native_obstacle()
    options = CacheOptions.from_environment(native_files.FOLDER)
    if obstacle is not None or options is None:
        return obstacle
    program = delegate.native_program()
    if program is None:
        return "one of its shapes needs Python"
    is_kept = native_files.write_native_file(options, program, method, processed)
    return None if is_kept else "the cache has no room for it"


def _lines(program: dict[str, Any]) -> Iterator[str]:
    yield f"{program['file']}: compiled in {program['seconds']:.2f} s"
    rows = [
        (
            f"  {part['method']}",
            "" if part["delegate"] is None else f"delegate {part['delegate']}",
            part["engine"],
            _calls(part),
        )
        for part in program["delegates"]
    ]
    yield console.columns(rows) if rows else "  it has no Core ML delegate"


def _calls(part: dict[str, Any]) -> str:
    if "python_reason" not in part:
        return ""
    calls, application = part["python_reason"], part["application_reason"]
    text = "calls without Python" if calls is None else f"calls in Python, because {calls}"
    if application == calls:
        return text
    return text + (
        "; applications without Python load it"
        if application is None
        else f"; not for applications without Python: {application}"
    )


COMMAND = Command(
    name="compile",
    summary="compile programs ahead of time, into the cache",
    description="Compile the delegates of a .pte, or the functions of an .mlpackage, for every "
    "method and enumerated shape. Loading then takes them from the cache; so do applications "
    "without Python (docs/native.md). Print how each of them is called.",
    add_arguments=add_arguments,
    run=run,
)
