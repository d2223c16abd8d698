"""Files that contenders load: one workload in one format each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from support.lowering import fp32_specs
from torch.export import ExportedProgram

from benchmarks.models import ExplicitState, Workload
from coreml_delegate import CoreMLPartitioner
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.targets import Opset


def _exported(workload: Workload) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(workload.module, workload.inputs)


def _stateless(workload: Workload) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The module and its inputs, what it keeps between calls being among them."""
    if not workload.stateful:
        return workload.module, workload.inputs
    module = ExplicitState(workload.module).eval()
    return module, (*workload.inputs, *workload.module.caches)


def _module(workload: Workload, path: Path) -> None:
    torch.save(workload.module, path)


def _pte(workload: Workload, path: Path, partitioner: object) -> None:
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(_exported(workload), partitioner=[partitioner])
    path.write_bytes(edge.to_executorch().buffer)


def _core_ml(precision: Precision) -> Callable[[Workload, Path], None]:
    def export(workload: Workload, path: Path) -> None:
        specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
        _pte(workload, path, CoreMLPartitioner(compile_specs=specs))

    return export


def _xnnpack(workload: Workload, path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    _pte(workload, path, XnnpackPartitioner())


def _onnx(workload: Workload, path: Path) -> None:
    module, inputs = _stateless(workload)
    with torch.no_grad():
        torch.onnx.export(module, inputs, path, dynamo=True, external_data=False, verbose=False)


def _openvino(workload: Workload, path: Path) -> None:
    import openvino as ov

    module, inputs = _stateless(workload)
    with torch.no_grad():
        model = ov.convert_model(torch.export.export(module, inputs))
    # The conversion forgets the sizes, without which half of its fusions do not happen.
    model.reshape(
        {
            port: ov.PartialShape(list(tensor.shape))
            for port, tensor in zip(model.inputs, inputs, strict=True)
        }
    )
    ov.save_model(model, path, compress_to_fp16=False)


EXPORTS: Mapping[str, Callable[[Workload, Path], None]] = {
    "module.pt": _module,
    "float32.pte": _core_ml(Precision.FLOAT32),
    "float16.pte": _core_ml(Precision.FLOAT16),
    "xnnpack.pte": _xnnpack,
    "model.onnx": _onnx,
    "openvino.xml": _openvino,
}
"""Writers by file name."""
