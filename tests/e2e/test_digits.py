"""A model trained here on real data keeps its accuracy through Core ML."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.digits import BATCH, accuracy, digits, predictions, trained
from support.lowering import PRECISIONS
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision


@pytest.mark.share(2)
@pytest.mark.parametrize("engine", ["openvino", "reference"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_accuracy_through_the_delegate_equals_eager(precision, engine):
    eager = accuracy(predictions(trained()))
    assert eager > 0.95, "the comparison means something"
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision)
    )
    exported = torch.export.export(trained(), (digits().test[:BATCH],))
    buffer = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer
    program = runtime.load_program(buffer, engine=engine)
    delegated = accuracy(predictions(lambda batch: program.run("forward", [batch])[0]))
    assert abs(delegated - eager) <= 0.005


def test_a_trained_network_needs_no_islands():
    model, images = trained(), digits().test[:BATCH]
    eager = accuracy(predictions(model))
    assert eager > 0.95, "the comparison means something"
    with torch.no_grad():
        expected = model(images).numpy()
    for precision in (Precision.FLOAT16, Precision.AUTO):
        partitioner = CoreMLPartitioner(
            compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision)
        )
        exported = torch.export.export(model, (images,))
        manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
        program = runtime.load_program(manager.to_executorch().buffer, engine="reference")
        (logits,) = program.run("forward", [images])
        assert sqnr_db(expected, logits.numpy()) >= SQNR_FP16_GUARDED
        delegated = accuracy(predictions(lambda batch, p=program: p.run("forward", [batch])[0]))
        assert abs(delegated - eager) <= 0.005
    assert partitioner.report.precision.islands == ()
    assert partitioner.report.precision.before_db >= SQNR_FP16_GUARDED
