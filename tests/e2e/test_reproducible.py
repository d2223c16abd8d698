"""Same model, same options, same bytes: in fresh processes with different hash seeds."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import warnings
from contextlib import redirect_stdout

EXPORT = """
import hashlib, sys, torch
from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.targets import Opset
from executorch.exir import to_edge_transform_and_lower

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.SiLU(),
            torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Hardswish(),
        )
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        x = self.body(x).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        # Skipped below, it splits the program in two partitions.
        return self.norm(torch.exp(x)).softmax(-1)

torch.manual_seed(0)
exported = torch.export.export(Model().eval(), (torch.randn(1, 3, 10, 10),))
partitioner = CoreMLPartitioner(
    compile_specs=CoreMLBackend.generate_compile_specs(), skip_ops_for_coreml_delegation=["exp"]
)
program = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
assert len(partitioner.report.partitions) == 2, str(partitioner.report)
sys.stdout.write(hashlib.sha256(program.buffer).hexdigest())

shared = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).eval()
methods = {
    name: torch.export.export(shared, (torch.randn(rows, 8),))
    for name, rows in (("prefill", 5), ("decode", 1), ("verify", 3))
}
partitioner = CoreMLPartitioner(
    compile_specs=CoreMLBackend.generate_compile_specs(minimum_deployment_target=Opset.iOS18)
)
program = to_edge_transform_and_lower(methods, partitioner=[partitioner]).to_executorch()
assert partitioner.report.partitions[0].shared_by == tuple(methods), str(partitioner.report)
sys.stdout.write(hashlib.sha256(program.buffer).hexdigest())
"""


def _export(tmp_path, seed: int) -> str:
    scratch = tmp_path / str(seed)
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXPORT],
        env=os.environ | {"PYTHONHASHSEED": str(seed), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == [], "files are left in the temporary directory"
    return done.stdout


def _export_here() -> str:
    """Export in this process, which draws its hash seed when it starts."""
    with redirect_stdout(io.StringIO()) as written, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(EXPORT, {})
    return written.getvalue()


def test_two_processes_write_equal_bytes(tmp_path):
    digests = {_export(tmp_path, seed=1), _export_here()}
    assert len(digests) == 1
    # Of one program with two partitions, and of one with three methods that share weights.
    assert len(digests.pop()) == 2 * len(hashlib.sha256().hexdigest())
