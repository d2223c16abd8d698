"""Read a program's models for ``device_check``; format findings for a terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coreml_delegate.device_check import CheckedModel, Finding, Rule, Use
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.formats.blob import Buffer, unflatten
from coreml_delegate.formats.blob_layout import DebugInfo, debug_info_in
from coreml_delegate.formats.mlpackage import map_package
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition import DelegationReport
from coreml_delegate.partition.report import DeviceFinding
from coreml_delegate.runtime.delegate import blob_files
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.program.plan import DelegateInfo
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts import console
from coreml_delegate.scripts.delegates import CoreMLPartition, all_partitions, read_etrecord
from coreml_delegate.scripts.profiles import modules_by_handle
from coreml_delegate.targets import ComputeUnit

_SHOWN_PLACES = 3  # of a finding, in its row of the page


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model with the files of its mlpackage.

    Attributes:
        files: Contents by path relative to the package.
    """

    model: CheckedModel
    files: Mapping[str, Buffer]


@dataclass(frozen=True, slots=True)
class ProgramModels:
    """The models of a program.

    Attributes:
        models: The readable models, each once.
        unreadable: Why a model cannot be read, by the names of its delegates.
    """

    models: tuple[ModelFiles, ...]
    unreadable: Mapping[str, str]

    @property
    def checked(self) -> list[CheckedModel]:
        """The models as the rules take them."""
        return [entry.model for entry in self.models]


def models_of_package(path: Path) -> ProgramModels:
    """Read an mlpackage; all of its functions count as used.

    Raises:
        BlobFormatError: A part is missing or malformed.
        ProgramError: The package does not exist, or is not an ML Program.
    """
    files = map_package(path)
    program = read_files(files)
    uses = tuple(Use(path.stem, name) for name in program.functions)
    return ProgramModels((ModelFiles(CheckedModel(program, uses), files),), {})


def models_of_pte(program: PteProgram, modules: Mapping[int, str] | None = None) -> ProgramModels:
    """Read the models of a ``.pte``'s Core ML delegates.

    Args:
        program: The program.
        modules: Path of the module of the original model, by debug handle; None if unknown.

    Raises:
        BlobFormatError: A reference leads nowhere, or a blob is malformed.
        ProgramError: There is no Core ML delegate.
    """
    models: list[ModelFiles] = []
    unreadable: dict[str, str] = {}
    for users in _by_blob(all_partitions(program)):
        blob = users[0].blob
        try:
            files, _ = blob_files(blob)
        except ProgramError as error:  # compiled ahead of time: only Apple devices can read it
            unreadable[", ".join(user.name for user in users)] = str(error)
            continue
        mil = read_files(files)
        uses = tuple(
            Use(
                user.name,
                mil.function(user.reference.function_name if user.reference else None).name,
                _compute_unit(user.info),
            )
            for user in users
        )
        symbols = _modules_by_symbol(debug_info_in(unflatten(blob)), modules or {})
        models.append(ModelFiles(CheckedModel(mil, uses, symbols), files))
    return ProgramModels(tuple(models), unreadable)


def _by_blob(partitions: Iterable[CoreMLPartition]) -> list[list[CoreMLPartition]]:
    """Group delegates by their blob in memory; equal bytes at two addresses are two blobs."""
    groups: dict[tuple[int, int], list[CoreMLPartition]] = {}
    for partition in partitions:
        view = np.frombuffer(partition.blob, np.uint8)
        groups.setdefault((view.ctypes.data, view.size), []).append(partition)
    return list(groups.values())


def _compute_unit(info: DelegateInfo) -> ComputeUnit | None:
    """Return the processors that a delegate is meant for; None if its compile specs are unknown."""
    try:
        options = CompileOptions.from_pairs(info.compile_specs)
    except OptionError:
        return None
    return options.compute_unit if options.device is None else options.device.compute_unit


def _modules_by_symbol(info: DebugInfo | None, modules: Mapping[int, str]) -> dict[str, str]:
    """Return the module of each operation's last call, whose value the operation computes."""
    if info is None:
        return {}
    return {
        symbol: modules[handles[-1]]
        for symbol, handles in info.handles.items()
        if handles and handles[-1] in modules
    }


def modules_of_etrecord(path: Path, program: PteProgram) -> dict[int, str]:
    """Return the paths of modules by debug handle, from the ETRecord of a program.

    Raises:
        ProgramError: See ``read_etrecord``.
    """
    return modules_by_handle(read_etrecord(path, program))


def modules_of_report(report: DelegationReport) -> dict[int, str]:
    """Return the paths of modules by debug handle, from the report of a lowering."""
    return {
        node.debug_handle: node.module
        for node in report.nodes
        if node.debug_handle is not None and node.module
    }


def table(findings: Sequence[Finding]) -> str:
    """Return findings for a terminal: one row for each, then every rule with its remedies."""
    rows = [("consequence", "rule", "where", "got")]
    rows += [
        (f.rule.consequence.text, f.rule.name, f.where, f.details.got + _saving(f))
        for f in findings
    ]
    sections = [console.columns(rows)]
    sections += [
        "\n".join(_rule_lines(rule, [f for f in findings if f.rule is rule]))
        for rule in dict.fromkeys(finding.rule for finding in findings)
    ]
    saved = saved_bytes(findings)
    if saved:
        sections.append(f"{console.size(saved)} could be saved")
    return "\n\n".join(sections)


def rules_text(rules: Sequence[Rule]) -> str:
    """Return all rules for a terminal."""
    return "\n\n".join("\n".join(_rule_lines(rule)) for rule in rules)


def _rule_lines(rule: Rule, findings: Sequence[Finding] = ()) -> Iterator[str]:
    """Yield the lines of a rule, with the remedies for its findings, or with the rule's own."""
    yield f"{rule.name}: {rule.finds} ({rule.consequence.text})"
    yield f"  {rule.reason}"
    for remedy in dict.fromkeys(f.remedy for f in findings) or [rule.remedy]:
        yield f"  remedy: {remedy}"
    rewrites = [f.rewrite for f in findings] if findings else [rule.rewrite]
    for rewrite in dict.fromkeys(filter(None, rewrites)):
        yield f"  done by: export {rewrite}"
    for reason in dict.fromkeys(_no_rewrite(f) for f in findings if f.obstacle):
        yield f"  {reason}"
    for source in rule.sources:
        yield f"  source: {source.title}"
        yield f"          {source.url}"


def _no_rewrite(finding: Finding) -> str:
    return f"not by --for: {finding.obstacle}"


def _saving(finding: Finding) -> str:
    saved = finding.details.saved_bytes
    return f" ({console.size(saved)} less)" if saved else ""


def saved_bytes(findings: Iterable[Finding]) -> int:
    """Return the bytes that remedies save; only the largest saving of each weight counts."""
    best: dict[tuple[str, str], int] = {}
    for finding in findings:
        details = finding.details
        if details.saved_bytes:
            key = details.delegate, details.places[0].name if details.places else ""
            best[key] = max(best.get(key, 0), details.saved_bytes)
    return sum(best.values())


def page_rows(findings: Iterable[Finding]) -> list[DeviceFinding]:
    """Return findings as rows of the report's page."""
    return [
        DeviceFinding(
            rule=finding.rule.name,
            consequence=finding.rule.consequence.text,
            delegate=finding.details.delegate,
            places=tuple(map(str, finding.details.places[:_SHOWN_PLACES])),
            others=max(len(finding.details.places) - _SHOWN_PLACES, 0),
            got=finding.details.got + _saving(finding),
            reason=finding.rule.reason,
            remedy=finding.remedy + (f" ({_no_rewrite(finding)})" if finding.obstacle else ""),
            sources=tuple((source.title, source.url) for source in finding.rule.sources),
        )
        for finding in findings
    ]
