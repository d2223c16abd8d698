"""The ``coreml-delegate`` command: parser, dispatch and the one error handler.

Exit codes: 0 done, 1 failed because of the input or the machine (one line on stderr says why),
2 wrong usage, 3 done, but the program needs kernels that ExecuTorch's runtime does not have,
128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Sequence

from coreml_delegate.errors import MissingKernelError
from coreml_delegate.patches.third_party import leave_out_unused_packages
from coreml_delegate.scripts import console, failures
from coreml_delegate.scripts.commands import (
    cache,
    check,
    compile_program,
    convert,
    demo,
    evaluate,
    export,
    export_embedding,
    export_llm,
    export_speech,
    extract,
    generate,
    inspect_program,
    profile,
    quantize_report,
    record,
    replay,
    run,
    sweep,
    trace_values,
    transcribe,
    verify,
)

logger = logging.getLogger(__name__)

COMMANDS = tuple(
    module.COMMAND
    for module in (
        export,
        convert,
        quantize_report,
        sweep,
        extract,
        inspect_program,
        run,
        verify,
        check,
        trace_values,
        profile,
        record,
        replay,
        compile_program,
        cache,
        export_embedding,
        export_llm,
        generate,
        evaluate,
        export_speech,
        transcribe,
        demo,
    )
)
_DONE, _FAILED, _MISSING_KERNELS = 0, 1, 3


def main_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=console.PROGRAM,
        description="Lower PyTorch models to Core ML delegates for ExecuTorch, inspect them, and "
        "run them on any machine.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name, help=command.summary, description=command.description
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, refuse_usage=subparser.error)
        subparser.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="log to stderr and show tracebacks of errors; twice for debugging output",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Raises:
        SystemExit: Wrong usage, help or version was asked for, or a signal to terminate arrived.
    """
    return console.until_interrupted(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parse(argv)
        with console.session(args.verbose):
            return _dispatch(args)
    except BrokenPipeError:
        return _stdout_reader_closed()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        return main_parser().parse_args(argv)
    except SystemExit:
        console.flush()  # here, where a closed pipe is handled
        raise


def _dispatch(args: argparse.Namespace) -> int:
    leave_out_unused_packages()
    try:
        code: int = args.run(args)
        console.flush()
    except BrokenPipeError:
        raise
    except failures.KINDS as error:
        message = failures.message(error)
        if message is None:
            raise
        logger.info("traceback of the error below", exc_info=True)
        console.complain(message)
        return _MISSING_KERNELS if isinstance(error, MissingKernelError) else _FAILED
    return code


def _stdout_reader_closed() -> int:
    """Discard further output; return the exit code of SIGPIPE."""
    # Text that is still buffered would raise again when the interpreter flushes at exit.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return 128 + getattr(signal, "SIGPIPE", 13)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        # Read only on demand: the installed metadata takes longer to read than all of --help.
        console.write(f"{console.PROGRAM} {importlib.metadata.version('coreml-delegate')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
