"""The report as JSON.

One object::

    schema_version  1; raised when a field is removed or changes its meaning, not when one is added
    summary         nodes, delegated, coverage (of nodes, 0 to 1), partitions (tags in the order in
                    which they run), first_split (name of a node, or null), weights and flops (each
                    delegated, total, coverage)
    partitions      list of PartitionReport; ops as an object of counts
    obstacles       list of Obstacle, that which it pays most to lift first; code beside its fields
    buffers         list of BufferReport, one for each mutable buffer
    nodes           list of NodeReport in graph order; delegated beside its fields

Sizes are in bytes. Reasons have code, text, remedy and issue.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from coreml_delegate.partition.report.records import Coverage, DelegationReport

SCHEMA_VERSION = 1


def to_dict(report: DelegationReport) -> dict[str, Any]:
    """See ``DelegationReport.to_dict``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "summary": {
            "nodes": len(report.nodes),
            "delegated": len(report.delegated),
            "coverage": round(report.coverage, 6),
            "partitions": list(report.tags),
            "first_split": report.first_split,
            "weights": _coverage(report.weights),
            "flops": _coverage(report.flops),
        },
        "partitions": [asdict(p) | {"ops": dict(p.ops)} for p in report.partitions],
        "obstacles": [asdict(o) | {"code": o.code} for o in report.obstacles],
        "buffers": [asdict(b) for b in report.buffers],
        "nodes": [asdict(n) | {"delegated": n.delegated} for n in report.nodes],
    }


def to_json(report: DelegationReport) -> str:
    """See ``DelegationReport.to_json``."""
    return json.dumps(to_dict(report), indent=2, sort_keys=True)


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return asdict(coverage) | {"coverage": round(coverage.ratio, 6)}
