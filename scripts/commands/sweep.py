"""``coreml-delegate sweep``: lower many models with many options, each in a process of its own."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coreml_delegate.errors import MissingKernelError, OptionError, ProgramError, near_matches
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command, add_number, add_path

if TYPE_CHECKING:
    from coreml_delegate.scripts.sweeping.fronts import Earlier
    from coreml_delegate.scripts.sweeping.jobs import Job
    from coreml_delegate.scripts.sweeping.records import ResultFolder, Row
    from coreml_delegate.scripts.sweeping.sweep_file import Skipped, SweepFile
    from coreml_delegate.scripts.sweeping.sweeps import Runner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file", type=Path, metavar="FILE.toml", help="models, options and limits of the sweep"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="results folder, which may have results (default: FILE_sweep, next to FILE.toml)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="run only jobs of this name, which may have wildcards; a model's name means all "
        "of its jobs; repeatable",
    )
    add_number(parser, "--jobs", "N", "jobs at a time (default: jobs in the file)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--scheduler",
        metavar="tcp://HOST:PORT",
        help="run the jobs on the workers of this dask scheduler",
    )
    add_number(where, "--workers", "N", "run the jobs on N dask workers of this machine")
    parser.add_argument(
        "--list", action="store_true", help="print each job and its missing work, and run no job"
    )
    add_path(
        parser, "--compare", "DIR", "folder of an earlier sweep: print the differences from it too"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run failed jobs again")
    parser.add_argument(
        "--keep-programs", action="store_true", help="leave the .pte of every job in DIR/programs"
    )
    arguments.add_allow_missing_kernels(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.scripts.sweeping import sweep_file
    from coreml_delegate.scripts.sweeping.fronts import Earlier
    from coreml_delegate.scripts.sweeping.job_process import require_limits
    from coreml_delegate.scripts.sweeping.records import ResultFolder, Row, read_results
    from coreml_delegate.scripts.sweeping.sweeps import Sweep

    file = sweep_file.read(args.file)
    require_limits(file.limits)
    jobs = _chosen(file.jobs, args.only)
    folder = ResultFolder(args.output or args.file.with_name(f"{args.file.stem}_sweep"))
    if folder.path.exists() and not folder.path.is_dir():
        raise OptionError("output is not a folder", got=str(folder.path))
    earlier = None if args.compare is None else Earlier(read_results(args.compare))
    with console.step("Reading the files of the jobs"):
        sweep = Sweep(file, jobs, folder, keep_programs=args.keep_programs)
    if args.list:
        for job, missing in sweep.missing(retry=args.retry_failed):
            console.write(f"{job.name}: {missing or 'nothing to do'}")
        return 0
    with _runner(args, file) as runner:
        records = sweep.run(runner, retry=args.retry_failed)
    rows = [Row.of(job, record) for job, record in zip(jobs, records, strict=True)]
    skipped = file.skipped if args.only is None else ()
    _write(args, folder, rows, skipped, earlier)
    failed = sum(not row.record.is_done for row in rows)
    if failed:
        raise ProgramError(f"{failed} of {len(rows)} jobs have no result", got=_reasons(rows))
    lacking = [row for row in rows if row.record.missing_kernels]
    if lacking and not args.allow_missing_kernels:
        operators = {operator for row in lacking for operator in row.record.missing_kernels}
        raise MissingKernelError(
            f"no device loads the programs of {len(lacking)} of {len(rows)} jobs",
            got=f"no kernel for {', '.join(sorted(operators))}",
            remedy="Register kernels with the app, or pass --allow-missing-kernels",
        )
    return 0


@contextmanager
def _runner(args: argparse.Namespace, file: SweepFile) -> Generator[Runner]:
    """Yield the runner of the jobs."""
    from coreml_delegate.scripts.sweeping.sweeps import run_here

    if args.scheduler is None and args.workers is None:
        yield run_here(file, args.jobs or file.parallel)
        return
    from coreml_delegate.scripts.sweeping.cluster import Cluster, connected

    if args.jobs is not None:
        args.refuse_usage(
            "--jobs is for this machine; a worker has one job for each of its threads"
        )
    with connected(args.scheduler, args.workers or 1) as client:
        wants_programs = args.keep_programs or file.repeat > 0
        yield Cluster(client, file.folder, file.limits, wants_programs=wants_programs).run


def _chosen(jobs: Sequence[Job], names: Sequence[str] | None) -> list[Job]:
    """Return the jobs whose name, or model's name, is in ``names``; all without ``names``.

    Raises:
        OptionError: A name matches no job.
    """
    if names is None:
        return list(jobs)
    chosen: set[str] = set()
    for name in names:
        matches = {job.name for job in jobs if _is_called(job, name)}
        if not matches:
            all_names = [label for job in jobs for label in (job.label, job.name)]
            raise OptionError(
                "no job of that name", got=repr(name), expected=near_matches(name, all_names)
            )
        chosen |= matches
    return [job for job in jobs if job.name in chosen]


def _is_called(job: Job, name: str) -> bool:
    # The brackets of a job's name are not wildcards.
    return any(
        fnmatch.fnmatchcase(own_name, name.replace("[", "[[]"))
        for own_name in (job.label, job.name)
    )


def _write(
    args: argparse.Namespace,
    folder: ResultFolder,
    rows: Sequence[Row],
    skipped: Sequence[Skipped],
    earlier: Earlier | None,
) -> None:
    from coreml_delegate.scripts.sweeping.fronts import to_table
    from coreml_delegate.scripts.sweeping.page import to_html

    page = to_html(
        rows,
        title=args.file.stem,
        skipped=skipped,
        earlier=earlier,
        compared=str(args.compare),
    )
    folder.write_results(rows, page)
    if args.json:
        document = [row.as_dict() for row in rows]
        console.write_json({"jobs": document, "skipped": {s.name: s.reason for s in skipped}})
    else:
        console.write(to_table(rows, skipped, earlier))


def _reasons(rows: Sequence[Row]) -> str:
    ended = Counter(row.record.status for row in rows if not row.record.is_done)
    return ", ".join(f"{count} {status.value}" for status, count in ended.items())


COMMAND = Command(
    name="sweep",
    summary="lower models with many options, and compare size, speed and accuracy",
    description="Lower every model of a file with every combination of its options, each in a "
    "process of its own, and compare size, latency, accuracy and the delegated share. Jobs "
    "with a result in the folder are not run again.",
    add_arguments=add_arguments,
    run=run,
)
