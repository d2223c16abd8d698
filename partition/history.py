"""The reports of one partitioner, which lowering goes on to complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coreml_delegate.conversion.blob_cache import KeptBlob, Outcome
from coreml_delegate.errors import ProgramError
from coreml_delegate.partition.report import DelegationReport


class ReportHistory:
    """Reports in the order in which programs were partitioned.

    Whether partitions share weights with those of other methods is known only when all are lowered,
    after the last has been reported on: it is added when a report is asked for.

    Args:
        reports: To begin with, complete.
        is_final: Whether what is reported on is lowered next.
    """

    def __init__(self, reports: Iterable[DelegationReport] = (), *, is_final: bool = True) -> None:
        self.is_final = is_final
        self._reports = list(reports)
        self._outcomes: list[Mapping[str, Outcome]] = [{} for _ in self._reports]

    def add(self, report: DelegationReport, blobs: Mapping[str, KeptBlob]) -> None:
        """Add a report, with the blobs of its partitions by tag as far as they are made."""
        self._reports.append(report)
        awaited = blobs if self.is_final else {}
        self._outcomes.append({tag: blob.expect() for tag, blob in awaited.items()})

    @property
    def all(self) -> tuple[DelegationReport, ...]:
        """Every report."""
        for index, outcomes in enumerate(self._outcomes):
            known = {tag: o.sharing for tag, o in outcomes.items() if o.sharing is not None}
            self._reports[index] = self._reports[index].with_sharing(known)
        return tuple(self._reports)

    @property
    def latest(self) -> DelegationReport:
        """The last report.

        Raises:
            ProgramError: There is none.
        """
        if not self._reports:
            raise ProgramError(
                "no report yet", remedy="Lower a program with this partitioner first"
            )
        return self.all[-1]
