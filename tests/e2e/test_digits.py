"""A model trained here on real data keeps its accuracy through Core ML."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from sklearn.datasets import load_digits

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.compile_options import Precision

BATCH = 100


class DigitsNet(torch.nn.Module):
    """Two convolutions and a linear layer for [N, 1, 8, 8] digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    split = len(x) - 4 * BATCH
    return x[order[:split]], y[order[:split]], x[order[split:]], y[order[split:]]


@pytest.fixture(scope="module")
def trained(digits):
    x, y, _, _ = digits
    torch.manual_seed(0)
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval()


def _accuracy(predict, x, y):
    logits = np.concatenate([predict(batch) for batch in x.split(BATCH)])
    return float((logits.argmax(axis=1) == y.numpy()).mean())


@pytest.mark.parametrize("engine", ["openvino", "reference"])
@pytest.mark.parametrize("precision", list(Precision))
def test_accuracy_through_the_delegate_equals_eager(digits, trained, precision, engine):
    _, _, x, y = digits
    with torch.no_grad():
        eager = _accuracy(lambda batch: trained(batch).numpy(), x, y)
    assert eager > 0.95, "the comparison means something"
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision)
    )
    exported = torch.export.export(trained, (x[:BATCH],))
    buffer = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer
    program = runtime.load_program(buffer, engine=engine)
    delegated = _accuracy(lambda batch: program.run("forward", [batch])[0].numpy(), x, y)
    assert abs(delegated - eager) <= 0.005
