"""``coreml-delegate replay``: repeat a recorded run here, and compare."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from coreml_delegate.errors import ProgramError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command, add_path
from coreml_delegate.scripts.commands.verify import print_results, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "recording", type=Path, metavar="FILE.cmlrun", help="file that record wrote"
    )
    add_path(
        parser,
        "program",
        "PROGRAM",
        "the program that was recorded (default: the one in the file)",
        nargs="?",
    )
    arguments.add_min_sqnr(parser)
    arguments.add_engine(parser, judging=True)
    arguments.add_data(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.runtime.loading import Execution
    from coreml_delegate.runtime.recording import Recording, write_files
    from coreml_delegate.scripts.program_arguments import engine_options
    from coreml_delegate.scripts.recordings import Loading, describe, replay

    recording = Recording.read(args.recording)
    if args.program is None and not recording.has_program:
        raise ProgramError(
            "the recording does not have its program",
            got=str(args.recording),
            remedy=f"Pass PROGRAM, the recorded {recording.program}",
        )
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
        path, data = args.program, args.data
        if path is None:
            path, data = write_files(recording, Path(folder))
        loading = Loading(path, args.engine, args.host, engine_options(args), tuple(data))
        with console.step("Comparing"):
            results, execution = replay(recording, loading)
    # A recorder that cannot read the program's types leaves them out.
    declared = tuple(sorted({t for types in execution.declared.values() for t in types}))
    engines = {name: types or declared for name, types in recording.run.engines.items()}
    recorded = Execution(engines, engines)
    print_results(results, execution, against=recorded, as_json=args.json)
    if not args.json:
        facts = describe(recording)
        where = ", ".join(filter(None, (facts["system"], facts["processor"])))
        units = ", ".join(facts["compute_units"])
        console.write(f"recorded on {where or 'an unknown machine'}, compute units {units}")
    require(results, args.min_sqnr, "this machine differs from the recording")
    return 0


COMMAND = Command(
    name="replay",
    summary="repeat a recorded run on this machine, and compare",
    description="Repeat the calls of a file that `coreml-delegate record` wrote, and compare every "
    "output and state with the recorded one.",
    add_arguments=add_arguments,
    run=run,
)
