"""Dense mixtures of experts: y = sum_e w_e E_e(x), with w_e = 0 unless the router chose expert e.

The router chooses its top K experts per token at run time (arXiv:1701.06538), but a program of
static shapes multiplies by the same weights each time. So every expert computes every token. The
first matrices of all experts are stacked to one linear layer, and so are the last matrices: two
matrix products for any number of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import NAME
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.patches.transformers import set_experts

_INTERFACE = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
"""Attributes of expert modules that call a function of ``ExpertsInterface``."""


class LastLayers(nn.Linear):
    """The last matrices of all experts, concatenated along their inputs.

    Args:
        weight: [H, E * I].
        inputs: Number I of inputs of one expert, which is the group size of int8 quantization.
    """

    def __init__(self, weight: torch.Tensor, inputs: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = _parameter(weight)
        self.inputs = inputs


class Experts(nn.Module):
    """Stacked experts; every expert computes every token.

    Args:
        first: First matrices [E, O, H] of all experts.
        last: Last matrices [E, H, I].
        first_bias: [E, O], or None.
        last_bias: [E, H], or None.

    Attributes:
        count: Number E of experts.
        first: From tokens [T, H] to [T, E * O].
        last: From [T, E * I] to the sum of all experts, [T, H].
        last_bias: [E, H], or None.
    """

    def __init__(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        first_bias: torch.Tensor | None,
        last_bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.count, outputs, width = first.shape
        self.first = nn.Linear(width, self.count * outputs, bias=False, device="meta")
        self.first.weight = _parameter(first.reshape(-1, width))
        if first_bias is not None:
            self.first.bias = _parameter(first_bias.flatten())
        inputs = last.shape[2]
        self.last = LastLayers(last.permute(1, 0, 2).reshape(width, -1), inputs)
        self.last_bias = None if last_bias is None else _parameter(last_bias)

    def forward(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the weighted sum [T, H] of the results of the chosen experts.

        Args:
            x: Tokens [T, H].
            indices: The experts chosen for each token, [T, K], integers.
            weights: Their weights [T, K].
            activate: From [..., O] to [..., I].
        """
        chosen = indices[..., None] == torch.arange(self.count)
        shares = torch.where(chosen, weights[..., None], 0.0).sum(1)
        hidden = activate(self.first(x).unflatten(-1, (self.count, -1)))
        factors = shares[..., None]
        # An expert that was not chosen may overflow in fp16, and zero times infinity is NaN.
        hidden = torch.where(factors != 0, hidden * factors, 0.0)
        result = self.last(hidden.flatten(1))
        return result if self.last_bias is None else result + shares @ self.last_bias


def compute_all(
    module: Any, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a module that ``stack_experts`` has prepared.

    Args:
        module: The experts.
        hidden_states: Tokens [T, H].
        indices: The experts chosen for each token, [T, K].
        weights: Their weights [T, K].

    Returns:
        [T, H].
    """
    activate = module._apply_gate if module.has_gate else module.act_fn
    return module.stacked(hidden_states, indices, weights, activate)


def stack_experts(model: nn.Module) -> None:
    """Stack the matrices of all experts of a model for ``compute_all``.

    Raises:
        LoweringError: The model's experts are of a form that is not supported.
    """
    for name, module in list(model.named_modules()):
        if all(hasattr(module, attribute) for attribute in _INTERFACE):
            _stack(name, module)
        elif "Experts" in type(module).__name__:
            _refuse(name, module)


def routers(model: nn.Module) -> frozenset[nn.Module]:
    """Return the routers' linear layers; with quantized weights they would choose other experts."""
    layers: set[nn.Module] = set()
    for block in model.modules():
        for experts in block.children():
            stacked = getattr(experts, "stacked", None)
            if isinstance(stacked, Experts):
                layers.update(_linear_layers(block, experts, stacked.count))
    return frozenset(layers)


def _linear_layers(block: nn.Module, experts: nn.Module, outputs: int) -> set[nn.Module]:
    return {
        module
        for part in block.children()
        if part is not experts
        for module in part.modules()
        if isinstance(module, nn.Linear) and module.out_features == outputs
    }


def _stack(name: str, module: Any) -> None:
    if module.has_post_expert_norm:
        _refuse(name, module)
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    parameters = {
        key: module._parameters.pop(key)
        for key in _parameter_names(first_name, biases=module.has_bias)
    }
    first, last = parameters[first_name], parameters["down_proj"]
    if module.is_transposed:
        first, last = first.transpose(1, 2), last.transpose(1, 2)
    biases = (parameters.get(f"{key}_bias") for key in (first_name, "down_proj"))
    module.stacked = Experts(first, last, *biases)
    set_experts(module.config, NAME)


def _parameter_names(first: str, *, biases: bool) -> tuple[str, ...]:
    matrices = (first, "down_proj")
    return (*matrices, *(f"{key}_bias" for key in matrices)) if biases else matrices


def _refuse(name: str, module: nn.Module) -> None:
    raise LoweringError(
        "this form of a mixture of experts is not supported",
        got=f"{type(module).__name__} at {name}",
    )


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


transformers().integrations.moe.ExpertsInterface.register(NAME, compute_all)
