"""Lower beside XNNPACK, with our partitioner and with ExecuTorch's own in its place.

Prints, as JSON, the delegates of both for each kind of program, and the ops outside. An op is left
out, but not of the quantized program: theirs takes its quantization, so that XNNPACK takes none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import coremltools as ct
import torch
from executorch.backends.apple.coreml.compiler import CoreMLBackend as TheirBackend
from executorch.backends.apple.coreml.partition import CoreMLPartitioner as TheirPartitioner
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from support.other_partitioners import KINDS, LINEAR, exported, lower

from coreml_delegate import CoreMLBackend, CoreMLPartitioner

_CLASSES = {
    "ours": (CoreMLPartitioner, CoreMLBackend),
    "theirs": (TheirPartitioner, TheirBackend),
}


def _delegates(kind: str, who: str) -> Any:
    left_out = [] if kind == "quantized" else [LINEAR]
    partitioner, backend = _CLASSES[who]
    specs = backend.generate_compile_specs(minimum_deployment_target=ct.target.iOS18)
    first = partitioner(compile_specs=specs, skip_ops_for_coreml_delegation=left_out)
    lowered = lower(exported(kind)[0], first, XnnpackPartitioner())
    return [[name, sorted(ops)] for name, ops in lowered.delegates], sorted(lowered.outside)


def main() -> int:
    """Lower everything, and print.

    Returns:
        The exit code.
    """
    with torch.no_grad():
        found = {kind: {who: _delegates(kind, who) for who in _CLASSES} for kind in KINDS}
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
