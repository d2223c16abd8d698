"""How much each layer loses by quantization, measured in PyTorch, and a mixture that loses less."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from coreml_delegate.errors import OptionError
from coreml_delegate.quantization_modes import (
    Method,
    QuantizationAssignment,
    QuantizationMode,
    mode_of,
)
from coreml_delegate.quantization_modes.configs import (
    has_rows,
    linear_quantizer_config,
    quantizer_config_of,
)
from coreml_delegate.scripts import console
from coreml_delegate.scripts.accuracy import Accuracy
from coreml_delegate.scripts.inputs.source import Source
from coreml_delegate.scripts.quantization import (
    Samples,
    exported_in_float,
    modules_of,
    obstacle,
    quantize_graph,
    quantize_modules,
)

FLOAT_BITS = 16
"""Of a weight that stays in float, as Core ML stores it by default."""


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """A layer that was quantized alone.

    Attributes:
        path: Of the module.
        kind: Its op or class.
        weights: How many it has.
        sqnr_db: Of the model's worst output against the float model's; inf for none lost.
    """

    path: str
    kind: str
    weights: int
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What quantization costs a model.

    Attributes:
        mode: The quantization.
        layers: Those that it has something to quantize of, the most sensitive first.
        uniform_db: SQNR with all of them quantized.
        target_db: What the suggestion had to reach.
        suggestion: The assignment that quantizes most and reaches it, or that loses least.
        suggested_db: Its SQNR.
    """

    mode: QuantizationMode
    layers: tuple[LayerSensitivity, ...]
    uniform_db: float
    target_db: float
    suggestion: QuantizationAssignment
    suggested_db: float

    @property
    def reached(self) -> bool:
        """Whether the suggestion is as good as it had to be."""
        return self.suggested_db >= self.target_db

    def bits(self, assignment: QuantizationAssignment) -> float:
        """Bits per weight, scales aside."""
        total = sum(layer.weights for layer in self.layers)
        used = sum(layer.weights * _bits(assignment.mode_for(layer.path)) for layer in self.layers)
        return used / max(total, 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the most sensitive layer first."""
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


def examine(
    source: Source, mode: QuantizationMode, samples: Samples, *, target_db: float
) -> Sensitivity:
    """Quantize each layer alone, then all, then as few less as the target takes.

    Args:
        source: The model, which is not modified.
        mode: The quantization.
        samples: To compare the outputs on, and to calibrate with; flattened as ``source.leaves``.
        target_db: SQNR that the suggestion is to reach.

    Raises:
        OptionError: The mode is not carried out in PyTorch, or has nothing to quantize.
    """
    if mode.method is Method.CONVERSION:
        raise OptionError(
            f"{mode.name} is carried out after conversion, and this measures in PyTorch",
            remedy="Examine codebook-N for palettize-N",
        )
    trial: _Trial = (_Graphs if mode.method is Method.PT2E else _Modules)(source, mode, samples)
    reference = [source.run(leaves) for leaves in samples]

    def measured(model: Callable[..., Any]) -> float:
        return sqnr_db(model, source, samples, reference)

    found: list[LayerSensitivity] = []
    with console.progress(trial.candidates, f"Quantizing layers alone by {mode.name}") as shown:
        for path in shown:
            alone = measured(trial.alone(path))
            found.append(LayerSensitivity(path, trial.kind(path), trial.weights(path), alone))
    layers = tuple(sorted(found, key=lambda layer: (layer.sqnr_db, layer.path)))
    ladder = _Ladder(mode, [layer.path for layer in layers])
    with console.step("Looking for a mixture"):
        reached = {0: measured(trial.by(ladder[0]))}
        step = _first_reaching(
            target_db, len(ladder), reached, lambda n: measured(trial.by(ladder[n]))
        )
    return Sensitivity(mode, layers, reached[0], target_db, ladder[step], reached[step])


class _Trial(Protocol):
    """A model to quantize in one way after the other."""

    @property
    def candidates(self) -> Sequence[str]:
        """Paths of the layers with something to quantize."""
        ...

    def kind(self, path: str) -> str:
        """What a layer is."""
        ...

    def weights(self, path: str) -> int:
        """How many weights a layer has."""
        ...

    def alone(self, path: str) -> Callable[..., Any]:
        """The model with one layer quantized."""
        ...

    def by(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        """The model quantized as assigned."""
        ...


class _Layers:
    def __init__(self, source: Source, mode: QuantizationMode, samples: Samples) -> None:
        self._source = source
        self._mode = mode
        self._samples = samples

    @cached_property
    def _state(self) -> Mapping[str, torch.Tensor]:
        if self._source.exported is not None:
            return self._source.exported.state_dict
        module = self._source.module
        return module.state_dict() if isinstance(module, nn.Module) else {}

    def weights(self, path: str) -> int:
        """How many weights a layer has; biases are not quantized."""
        weight = self._state.get(f"{path}.weight")
        if weight is not None:
            return weight.numel()
        inside = (t for name, t in self._state.items() if name.startswith(f"{path}."))
        return sum(tensor.numel() for tensor in inside if tensor.dim() > 1)


class _Graphs(_Layers):
    """Quantized by PT2E, with a copy of the exported graph for each trial."""

    def __init__(self, source: Source, mode: QuantizationMode, samples: Samples) -> None:
        super().__init__(source, mode, samples)
        self._graph: GraphModule = exported_in_float(source).module()  # pyright: ignore[reportAttributeAccessIssue]
        _, report = self._quantized(linear_quantizer_config(mode))
        named = {n.module: n.op for n in reversed(report.nodes) if n.weight and n.module}
        self._kinds = dict(reversed(named.items()))
        if not self._kinds:
            raise OptionError(f"no layer of the model has anything to quantize by {mode.name}")

    @property
    def candidates(self) -> Sequence[str]:
        return list(self._kinds)

    def kind(self, path: str) -> str:
        return self._kinds[path].removeprefix("aten.").partition(".")[0]

    def alone(self, path: str) -> Callable[..., Any]:
        return self._quantized(linear_quantizer_config(None, {path: self._mode}))[0]

    def by(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        return self._quantized(quantizer_config_of(assignment))[0]

    def _quantized(self, config: Any) -> tuple[GraphModule, Any]:
        calibration = (self._source.structured(leaves) for leaves in self._samples)
        return quantize_graph(copy.deepcopy(self._graph), config, calibration)


class _Modules(_Layers):
    """Quantized by torchao, with a copy of the module for each trial."""

    def __init__(self, source: Source, mode: QuantizationMode, samples: Samples) -> None:
        super().__init__(source, mode, samples)
        self._module = modules_of(source, mode)
        self._kinds = {
            path: type(layer).__name__
            for path, layer in self._module.named_modules()
            if path and has_rows(layer) and obstacle(layer, mode) is None
        }
        if not self._kinds:
            raise OptionError(
                f"no layer of the model has anything to quantize by {mode.name}",
                remedy="int8-weight and int4-weight quantize every kind of layer",
            )

    @property
    def candidates(self) -> Sequence[str]:
        return list(self._kinds)

    def kind(self, path: str) -> str:
        return self._kinds[path]

    def alone(self, path: str) -> Callable[..., Any]:
        modes = {other: self._mode if other == path else None for other in self._kinds}
        return self.by(QuantizationAssignment(self._mode, modes))

    def by(self, assignment: QuantizationAssignment) -> Callable[..., Any]:
        module = copy.deepcopy(self._module)
        quantize_modules(module, assignment)
        return module


class _Ladder:
    """Assignments from the coarsest to almost float: the most sensitive layers go first."""

    def __init__(self, mode: QuantizationMode, ranking: Sequence[str]) -> None:
        self._mode = mode
        self._ranking = ranking
        self._rungs = [mode, *_reliefs(mode)]

    def __len__(self) -> int:
        # The last step would leave nothing quantized.
        return (len(self._rungs) - 1) * len(self._ranking)

    def __getitem__(self, step: int) -> QuantizationAssignment:
        rung, relieved = divmod(step, len(self._ranking))
        modes = {
            path: self._rungs[rung + 1] if place < relieved else self._rungs[rung]
            for place, path in enumerate(self._ranking)
        }
        return QuantizationAssignment(
            self._mode, {path: mode for path, mode in modes.items() if mode is not self._mode}
        )


def _reliefs(mode: QuantizationMode) -> Iterator[QuantizationMode | None]:
    while mode.relief is not None:
        mode = mode_of(mode.relief)
        yield mode
    yield None


def _first_reaching(
    target: float, steps: int, known: dict[int, float], measure: Callable[[int], float]
) -> int:
    """The first step that reaches the target, by bisection; the best known if none does."""
    if known[0] >= target:
        return 0
    low, high = 0, steps - 1
    if high not in known:
        known[high] = measure(high)
    if known[high] < target:
        return max(known, key=lambda step: known[step])
    while high - low > 1:
        middle = (low + high) // 2
        known[middle] = measure(middle)
        low, high = (low, middle) if known[middle] >= target else (middle, high)
    return high


def sqnr_db(
    model: Callable[..., Any],
    source: Source,
    samples: Samples,
    reference: Sequence[Sequence[torch.Tensor]],
) -> float:
    """SQNR of a model's worst output over all samples, in dB.

    Args:
        model: Called with the inputs of ``source``.
        source: Gives the inputs their structure.
        samples: Flattened inputs.
        reference: The expected outputs for each sample.
    """
    accuracies: dict[int, Accuracy] = {}
    for leaves, expected in zip(samples, reference, strict=True):
        actual = replace(source, module=model).run(leaves)
        for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
            accuracies.setdefault(place, Accuracy()).add(want, got)
    return min((accuracy.sqnr_db for accuracy in accuracies.values()), default=math.inf)


def _bits(mode: QuantizationMode | None) -> int:
    return FLOAT_BITS if mode is None else mode.bits


def _name(mode: QuantizationMode | None) -> str | None:
    return None if mode is None else mode.name
