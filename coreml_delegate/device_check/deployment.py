"""The oldest opset that can express a program, and the rule on unnecessarily new targets.

An op has the version of its program's opset. An older opset suffices if its version of the op takes
the same arguments: arguments that it lacks have their default values, and the types of all other
arguments are in its domains. States, int4 and other features need a certain opset.

Source: coremltools 9.0, the versions of each op in ``SSAOpRegistry`` with their ``input_spec``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView
from coreml_delegate.device_check.records import (
    CheckedModel,
    Consequence,
    Details,
    Evidence,
    Rule,
)
from coreml_delegate.errors import OptionError
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.engines.reference.kernels import KERNELS
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Binding,
    ColorSpace,
    Function,
    Op,
    Program,
    TensorType,
)
from coreml_delegate.targets import STATE_OPSET, Opset

_OLDEST = min(Opset)
_STATES = "states"
_NO_INPUTS = "a function without inputs"
_FUNCTIONS = "several functions"
_SEVERAL_SHAPES = "enumerated shapes of several inputs"
_STATE_OPS = frozenset({"coreml_update_state", "read_state", "write_state"})
_CAST = "cast"


@dataclass(frozen=True, slots=True)
class Demand:
    """An op or feature of a program that needs a certain opset."""

    opset: Opset
    what: str


def demands_of(program: Program) -> list[Demand]:
    """Return the demands of a program beyond the oldest opset, newest first.

    Raises:
        OptionError: A function has an unknown opset.
    """
    demands: set[Demand] = set()
    if len(program.functions) > 1:
        demands.add(Demand(STATE_OPSET, _FUNCTIONS))
    for function in program.functions.values():
        demands.update(_boundary(function))
        view = FunctionView(function, "", {})
        opset = Opset.from_mil_name(function.opset)
        demands.update(Demand(_oldest_for(view, op, opset), op.type) for op in view.locations)
    newer = [demand for demand in demands if demand.opset > _OLDEST]
    return sorted(newer, key=lambda demand: (-demand.opset, demand.what))


def _boundary(function: Function) -> Iterator[Demand]:
    """Yield the demands of the inputs, outputs and states of a function."""
    if function.states:
        yield Demand(STATE_OPSET, _STATES)
    if not function.inputs:
        yield Demand(STATE_OPSET, _NO_INPUTS)
    if sum(bool(feature.shapes) for feature in function.inputs) > 1:
        yield Demand(STATE_OPSET, _SEVERAL_SHAPES)
    for feature in (*function.inputs, *function.outputs):
        if feature.color_space is ColorSpace.GRAYSCALE_FLOAT16 or (
            feature.color_space is None and feature.type.dtype is DType.FP16
        ):
            yield Demand(Opset.iOS16, "inputs and outputs in fp16")
        elif feature.color_space is None and feature.type.dtype is DType.INT8:
            yield Demand(Opset.iOS26, "inputs and outputs in int8")


def _oldest_for(view: FunctionView, op: Op, opset: Opset) -> Opset:
    """Return the oldest opset, at most the program's, with an equivalent version of an op."""
    if op.type in _STATE_OPS:
        return STATE_OPSET
    dtypes = [value.type.dtype for value in op.outputs if isinstance(value.type, TensorType)]
    if any(dtype.is_packed for dtype in dtypes):
        return Opset.iOS18
    versions = _versions(op.type)
    current = _version(versions, opset)
    oldest = opset
    for older in sorted((o for o in Opset if o < opset), reverse=True):
        version = _version(versions, older)
        if version is None or current is None:
            break
        if version is not current and not _accepts(version, view, op, opset):
            break
        oldest = older
    return oldest


def _versions(op_type: str) -> Mapping[int, Any]:
    """Return the classes of an op by the specification version of their opset."""
    coremltools()
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    registered: Any = SSAOpRegistry.core_ops
    return {int(target): cls for target, cls in registered.get(op_type, {}).items()}


def _version(versions: Mapping[int, Any], opset: Opset) -> Any:
    available = [version for version in versions if version <= opset]
    return versions[max(available)] if available else None


def _accepts(version: Any, view: FunctionView, op: Op, opset: Opset) -> bool:
    """Whether a version of an op takes the arguments of a newer version, with the same result."""
    accepted: Mapping[str, Any] = version.input_spec.input_types
    # Decompression ops of iOS16 have their arguments as attributes.
    arguments: dict[str, tuple[Binding, ...]] = {
        name: (value,) for name, value in op.attributes.items() if name != "name"
    }
    arguments |= dict(op.inputs)
    required = {name for name, spec in accepted.items() if not spec.optional}
    if required - arguments.keys():
        return False
    if op.type == _CAST and not _casts_to(version, view, op):
        return False
    return all(
        _accepts_types(version, accepted[name], view, bindings)
        if name in accepted
        else _is_default(view, op, name, opset)
        for name, bindings in arguments.items()
    )


def _accepts_types(
    version: Any, spec: Any, view: FunctionView, bindings: tuple[Binding, ...]
) -> bool:
    if spec.const and not all(map(view.is_stored, bindings)):
        return False
    domain = getattr(spec, "type_domain", None)
    if domain is None:
        return True
    labels = {_label(kind) for kind in domain or version.type_domains[spec.type_domain_id]}
    kinds = [view.tensor_of(binding) for binding in bindings]
    return all(kind is None or kind.dtype.label in labels for kind in kinds)


def _label(kind: Any) -> str:
    from coremltools.converters.mil.mil import types

    label = str(types.builtin_to_string(kind))
    return DType.STRING.label if label == "str" else label


def _casts_to(version: Any, view: FunctionView, op: Op) -> bool:
    dtype = view.constant(op, "dtype")
    label = None if dtype is None else dtype.data
    return isinstance(label, str) and label in version.supported_dtypes()


def _is_default(view: FunctionView, op: Op, name: str, opset: Opset) -> bool:
    """Whether an argument equals the default of its parameter in the reference engine's kernel."""
    kernel = KERNELS.find(op.type, opset)
    constant = view.constant(op, name)
    if kernel is None or constant is None or name not in kernel.schema.parameters:
        return False
    default = inspect.signature(kernel.function).parameters[name].default
    value = constant.data
    if isinstance(value, np.ndarray):
        return default is not inspect.Parameter.empty and np.array_equal(value, default)
    return value == default


def _newer_than_needed(evidence: Evidence) -> Iterator[Details]:
    for model in evidence.models:
        try:
            demands = demands_of(model.program)
        except OptionError:
            continue  # an opset that this package does not know
        target = _target(model)
        needs = max((demand.opset for demand in demands), default=_OLDEST)
        if target is not None and needs < target:
            causes = [demand.what for demand in demands if demand.opset is needs]
            because = f", for {', '.join(causes)}" if causes else ""
            yield Details(
                model.name,
                None,
                f"{target.name}; {needs.name} has all that it uses{because}",
                remedy=f"Lower for {needs.name} (--deployment-target {needs.name})",
            )


def _target(model: CheckedModel) -> Opset | None:
    version = model.program.specification_version
    return Opset(version) if version in {int(opset) for opset in Opset} else None


RULES = (
    Rule(
        name="deployment-target",
        finds="a deployment target newer than the model needs",
        reason="A model of opset CoreML7 does not load before iOS17 and macOS 14, and so with "
        "every opset: older systems do not know it.",
        consequence=Consequence.NEWER_SYSTEM,
        remedy="Lower for an older target",
        sources=(sources.TROUBLESHOOTING, sources.MIL_OPS),
        examine=_newer_than_needed,
        neural_engine=False,
    ),
)
