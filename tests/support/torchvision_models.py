"""Torchvision classification models with random weights that behave like trained ones."""

from __future__ import annotations

import torch

from coreml_delegate.scripts.inputs.vision import import_torchvision

# Their own initialisation is slow; the default of their layers serves as well.
_NO_INIT = frozenset({"googlenet", "inception_v3"})


def build(name: str, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model in eval mode and an input for it.

    Freshly initialised, a deep network without batch statistics shrinks or blows up its activations
    until they underflow or overflow in fp16. Normalizations therefore get the statistics of a
    batch, and heads that are initialized with zeros get random weights.

    Returns:
        The model, and an input of shape [1, 3, size, size], fp32.
    """
    models = import_torchvision().models
    torch.manual_seed(0)
    keywords: dict[str, bool] = {"init_weights": False} if name in _NO_INIT else {}
    model = models.get_model(name, weights=None, **keywords)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and not layer.weight.any():
            torch.nn.init.xavier_uniform_(layer.weight)
    batch = torch.randn(4, 3, size, size)
    set_statistics(model, batch)
    return model.eval(), torch.randn(1, 3, size, size)


def set_statistics(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Give the batch normalizations of a model the statistics of a batch."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
