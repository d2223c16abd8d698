"""Loss of accuracy by quantization per layer, measured in PyTorch, and a better mix of modes."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from coreml_delegate.errors import OptionError
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.quantization.apply import (
    Samples,
    export_in_float,
    obstacle,
    quantize_graph,
    quantize_modules,
    require_module,
)
from coreml_delegate.quantization.assignment import QuantizationAssignment
from coreml_delegate.quantization.configs import (
    has_rows,
    linear_quantizer_config,
    quantizer_config_of,
)
from coreml_delegate.quantization.modes import Method, QuantizationMode, mode_of
from coreml_delegate.runtime.accuracy import Accuracy

FLOAT_BITS = 16
"""Bits of a weight that stays in float, as Core ML stores it by default."""


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """Accuracy of the model with only one layer quantized.

    Attributes:
        sqnr_db: SQNR of the model's worst output against the float model; inf if they are equal.
    """

    path: str
    kind: str
    weights: int
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Accuracy of the quantized model, by layer, and a suggested assignment that loses less.

    Attributes:
        layers: The layers that the mode quantizes, the most sensitive first.
        uniform_db: SQNR with all layers quantized by ``mode``.
        target_db: Target SQNR of the suggestion.
        suggestion: The assignment that reaches the target and quantizes most; if the target is out
            of reach, the assignment with the largest SQNR.
    """

    mode: QuantizationMode
    layers: tuple[LayerSensitivity, ...]
    uniform_db: float
    target_db: float
    suggestion: QuantizationAssignment
    suggested_db: float

    @property
    def reached(self) -> bool:
        """Whether the suggestion reaches the target."""
        return self.suggested_db >= self.target_db

    def bits(self, assignment: QuantizationAssignment) -> float:
        """Return the mean bits per weight under an assignment, not counting scales."""
        total = sum(layer.weights for layer in self.layers)
        used = sum(layer.weights * _bits(assignment.mode_for(layer.path)) for layer in self.layers)
        return used / max(total, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the most sensitive layer first."""
        uniform = QuantizationAssignment(self.mode)
        return {
            "schema_version": 1,
            "mode": self.mode.name,
            "uniform": {"sqnr_db": self.uniform_db, "bits_per_weight": self.bits(uniform)},
            "suggestion": {
                "sqnr_db": self.suggested_db,
                "bits_per_weight": self.bits(self.suggestion),
                "target_db": self.target_db,
                "reached": self.reached,
                "config": self.suggestion.as_dict(),
            },
            "layers": [
                {
                    "path": layer.path,
                    "kind": layer.kind,
                    "weights": layer.weights,
                    "sqnr_db": layer.sqnr_db,
                    "suggested": _name(self.suggestion.mode_for(layer.path)),
                }
                for layer in self.layers
            ],
        }


class SensitivityStudy:
    """Measures layers one by one, and searches for a mix of modes.

    Args:
        samples: Inputs to calibrate with, each flattened as ``source.leaves``.
        data: Inputs to compare the outputs on; None for ``samples``. It is iterated for each
            measurement, and the model's outputs are recomputed each time, so that it may be larger
            than memory.

    Attributes:
        layers: Paths of the layers that the mode quantizes.

    Raises:
        OptionError: The mode is not applied in PyTorch, or quantizes no layer.
    """

    def __init__(
        self,
        source: SourceModel,
        mode: QuantizationMode,
        samples: Samples,
        data: Iterable[Sequence[Any]] | None = None,
    ) -> None:
        if mode.method is Method.CONVERSION:
            raise OptionError(
                f"{mode.name} is applied after conversion, and sensitivity is measured in PyTorch",
                remedy="Examine codebook-N for palettize-N",
            )
        self._source = source
        self._mode = mode
        kind = _GraphTrial if mode.method is Method.PT2E else _ModuleTrial
        self._trial: _Trial = kind(source, mode, samples)
        self._compared: Iterable[tuple[Sequence[Any], Sequence[torch.Tensor]]] = (
            [(leaves, source.run(leaves)) for leaves in samples]
            if data is None
            else _RecomputedOutputs(source, data)
        )
        self.layers: Sequence[str] = list(self._trial.kinds)

    def measure(self, path: str) -> LayerSensitivity:
        """Quantize only one layer and compare the outputs."""
        loss = self._sqnr_db(self._trial.quantize_only(path))
        return LayerSensitivity(path, self._trial.kinds[path], self._trial.weights(path), loss)

    def suggest(self, measured: Sequence[LayerSensitivity], *, target_db: float) -> Sensitivity:
        """Search for the assignment that quantizes most and reaches a target.

        Args:
            measured: All layers, in any order.
            target_db: SQNR to reach.
        """
        layers = tuple(sorted(measured, key=lambda layer: (layer.sqnr_db, layer.path)))
        ladder = _Ladder(self._mode, [layer.path for layer in layers])

        def measure_step(step: int) -> float:
            return self._sqnr_db(self._trial.quantize(ladder[step]))

        sqnr = {0: measure_step(0)}
        step = _find_first_reaching(target_db, len(ladder), sqnr, measure_step)
        return Sensitivity(self._mode, layers, sqnr[0], target_db, ladder[step], sqnr[step])

    def _sqnr_db(self, model: Callable[..., Any]) -> float:
        """Return the SQNR of a model's worst output over all samples, in dB."""
        accuracies: dict[int, Accuracy] = {}
        quantized = replace(self._source, module=model)
        for leaves, expected in self._compared:
            actual = quantized.run(leaves)
            for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
                accuracies.setdefault(index, Accuracy()).add(want, got)
        return min((accuracy.sqnr_db for accuracy in accuracies.values()), default=math.inf)


@dataclass(frozen=True, slots=True)
class _RecomputedOutputs:
    """Inputs with the model's outputs, recomputed in each iteration."""

    source: SourceModel
    data: Iterable[Sequence[Any]]

    def __iter__(self) -> Iterator[tuple[Sequence[Any], Sequence[torch.Tensor]]]:
        return ((leaves, self.source.run(leaves)) for leaves in self.data)


class _Trial(ABC):
    """Quantizes copies of a model by different assignments."""

    kinds: Mapping[str, str]

    def __init__(self, source: SourceModel, mode: QuantizationMode, samples: Samples) -> None:
        self._source = source
        self._mode = mode
        self._samples = samples

    @abstractmethod
    def quantize_only(self, path: str) -> Callable[..., Any]:
        """Return the model with only the layer at ``path`` quantized."""

    @abstractmethod
    def quantize(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        """Return the model quantized by an assignment."""

    @cached_property
    def _state(self) -> Mapping[str, torch.Tensor]:
        if self._source.exported is not None:
            return self._source.exported.state_dict
        module = self._source.module
        return module.state_dict() if isinstance(module, nn.Module) else {}

    def weights(self, path: str) -> int:
        """Return the number of weights of a layer, without biases, which are not quantized."""
        weight = self._state.get(f"{path}.weight")
        if weight is not None:
            return weight.numel()
        inside = (t for name, t in self._state.items() if name.startswith(f"{path}."))
        return sum(tensor.numel() for tensor in inside if tensor.dim() > 1)


class _GraphTrial(_Trial):
    """Quantizes by PT2E, with a copy of the exported graph for each trial."""

    def __init__(self, source: SourceModel, mode: QuantizationMode, samples: Samples) -> None:
        super().__init__(source, mode, samples)
        self._graph: GraphModule = export_in_float(source).module()  # pyright: ignore[reportAttributeAccessIssue]
        _, report = self._quantize(linear_quantizer_config(mode))
        # The kind of a module is its first op with a weight.
        ops = {n.module: n.op for n in reversed(report.nodes) if n.weight and n.module}
        self.kinds = {
            path: op.removeprefix("aten.").partition(".")[0] for path, op in reversed(ops.items())
        }
        if not self.kinds:
            raise OptionError(f"no layer of the model has anything to quantize by {mode.name}")

    def quantize_only(self, path: str) -> Callable[..., Any]:
        return self._quantize(linear_quantizer_config(None, {path: self._mode}))[0]

    def quantize(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        return self._quantize(quantizer_config_of(assignment))[0]

    def _quantize(self, config: Any) -> tuple[GraphModule, Any]:
        calibration = (self._source.unflatten(leaves) for leaves in self._samples)
        return quantize_graph(copy.deepcopy(self._graph), config, calibration)


class _ModuleTrial(_Trial):
    """Quantizes by torchao, with a copy of the module for each trial."""

    def __init__(self, source: SourceModel, mode: QuantizationMode, samples: Samples) -> None:
        super().__init__(source, mode, samples)
        self._module = require_module(source, mode)
        self.kinds = {
            path: type(layer).__name__
            for path, layer in self._module.named_modules()
            if path and has_rows(layer) and obstacle(layer, mode) is None
        }
        if not self.kinds:
            raise OptionError(
                f"no layer of the model has anything to quantize by {mode.name}",
                remedy="int8-weight and int4-weight quantize every kind of layer",
            )

    def quantize_only(self, path: str) -> Callable[..., Any]:
        modules = {other: self._mode if other == path else None for other in self.kinds}
        return self.quantize(QuantizationAssignment(self._mode, modules))

    def quantize(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        module = copy.deepcopy(self._module)
        quantize_modules(module, assignment)
        return module


class _Ladder:
    """Assignments from uniform to almost float; each step gives one more layer a finer mode.

    The order is by sensitivity: first every layer gets the next finer mode, then the one after it.
    """

    def __init__(self, mode: QuantizationMode, ranking: Sequence[str]) -> None:
        self._mode = mode
        self._ranking = ranking
        self._modes = [mode, *_finer_modes(mode)]

    def __len__(self) -> int:
        # Without the last step, which would leave nothing quantized.
        return (len(self._modes) - 1) * len(self._ranking)

    def __getitem__(self, step: int) -> QuantizationAssignment:
        level, finer = divmod(step, len(self._ranking))
        modes = {
            path: self._modes[level + 1] if rank < finer else self._modes[level]
            for rank, path in enumerate(self._ranking)
        }
        return QuantizationAssignment(
            self._mode, {path: mode for path, mode in modes.items() if mode is not self._mode}
        )


def _finer_modes(mode: QuantizationMode) -> Iterator[QuantizationMode | None]:
    while mode.relief is not None:
        mode = mode_of(mode.relief)
        yield mode
    yield None


def _find_first_reaching(
    target: float, steps: int, sqnr_by_step: dict[int, float], measure: Callable[[int], float]
) -> int:
    """Return the first step that reaches the target, by bisection, or else the best step.

    Args:
        target: SQNR in dB.
        steps: Number of steps.
        sqnr_by_step: SQNR by step, with step 0; measured steps are added.
        measure: Returns the SQNR of a step.
    """
    if sqnr_by_step[0] >= target:
        return 0
    low, high = 0, steps - 1
    if high not in sqnr_by_step:
        sqnr_by_step[high] = measure(high)
    if sqnr_by_step[high] < target:
        return max(sqnr_by_step, key=lambda step: sqnr_by_step[step])
    while high - low > 1:
        middle = (low + high) // 2
        sqnr_by_step[middle] = measure(middle)
        low, high = (low, middle) if sqnr_by_step[middle] >= target else (middle, high)
    return high


def _bits(mode: QuantizationMode | None) -> int:
    return FLOAT_BITS if mode is None else mode.bits


def _name(mode: QuantizationMode | None) -> str | None:
    return None if mode is None else mode.name
