"""The oldest opset that has all that a program uses, and the rule on a newer deployment target.

An op of a program has the version that its opset has. An older opset will do if it has the op, and
its version takes the same arguments: those that it lacks have their defaults, the others have types
that it takes. States, int4 and other features came with an opset of their own.

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
    Evidence,
    Found,
    Rule,
)
from coreml_delegate.errors import OptionError
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
from coreml_delegate.third_party import coremltools

_OLDEST = min(Opset)
_STATES = "states"
_NO_INPUTS = "a function without inputs"
_FUNCTIONS = "several functions"
_SEVERAL_SHAPES = "enumerated shapes of several inputs"
_STATE_OPS = frozenset({"coreml_update_state", "read_state", "write_state"})
_CAST = "cast"


@dataclass(frozen=True, slots=True)
class Demand:
    """A part of a program that an opset has and older ones lack.

    Attributes:
        opset: The first that has it.
        what: An op type, or a feature of the program.
    """

    opset: Opset
    what: str


def demands_of(program: Program) -> list[Demand]:
    """Return what a program demands beyond the oldest opset, newest first.

    Raises:
        OptionError: A function has an unknown opset.
    """
    found: set[Demand] = set()
    if len(program.functions) > 1:
        found.add(Demand(STATE_OPSET, _FUNCTIONS))
    for function in program.functions.values():
        found.update(_boundary(function))
        view = FunctionView(function, "", {})
        opset = Opset.from_mil_name(function.opset)
        found.update(Demand(_oldest(view, op, opset), op.type) for op in view.locations)
    beyond = [demand for demand in found if demand.opset > _OLDEST]
    return sorted(beyond, key=lambda demand: (-demand.opset, demand.what))


def oldest_opset(program: Program) -> Opset:
    """Return the oldest opset that has all that a program uses.

    Raises:
        OptionError: A function has an unknown opset.
    """
    return max((demand.opset for demand in demands_of(program)), default=_OLDEST)


def _boundary(function: Function) -> Iterator[Demand]:
    """Yield what the inputs, outputs and states of a function demand."""
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


def _oldest(view: FunctionView, op: Op, opset: Opset) -> Opset:
    """Return the oldest opset, up to that of the program, that has an op as it is."""
    if op.type in _STATE_OPS:
        return STATE_OPSET
    narrow = [value.type.dtype for value in op.outputs if isinstance(value.type, TensorType)]
    if any(dtype.is_packed for dtype in narrow):
        return Opset.iOS18
    versions = _versions(op.type)
    own = _version(versions, opset)
    oldest = opset
    for older in sorted((each for each in Opset if each < opset), reverse=True):
        version = _version(versions, older)
        if version is None or own is None:
            break
        if version is not own and not _takes(version, view, op, opset):
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
    known = [version for version in versions if version <= opset]
    return versions[max(known)] if known else None


def _takes(version: Any, view: FunctionView, op: Op, opset: Opset) -> bool:
    """Whether a version of an op takes the arguments of a newer one, and gives the same type."""
    accepted: Mapping[str, Any] = version.input_spec.input_types
    # The ops of iOS16 that decompress weights have their arguments as attributes.
    given: dict[str, tuple[Binding, ...]] = {
        name: (value,) for name, value in op.attributes.items() if name != "name"
    }
    given |= dict(op.inputs)
    required = {name for name, spec in accepted.items() if not spec.optional}
    if required - given.keys():
        return False
    if op.type == _CAST and not _casts_to(version, view, op):
        return False
    return all(
        _fits(version, accepted[name], view, bindings)
        if name in accepted
        else _is_default(view, op, name, opset)
        for name, bindings in given.items()
    )


def _fits(version: Any, spec: Any, view: FunctionView, bindings: tuple[Binding, ...]) -> bool:
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
    wanted = view.constant(op, "dtype")
    label = None if wanted is None else wanted.data
    return isinstance(label, str) and label in version.supported_dtypes()


def _is_default(view: FunctionView, op: Op, name: str, opset: Opset) -> bool:
    """Whether an argument is the default of its parameter, as the reference engine has it."""
    kernel = KERNELS.find(op.type, opset)
    constant = view.constant(op, name)
    if kernel is None or constant is None or name not in kernel.schema.parameters:
        return False
    default = inspect.signature(kernel.function).parameters[name].default
    given = constant.data
    if isinstance(given, np.ndarray):
        return default is not inspect.Parameter.empty and np.array_equal(given, default)
    return given == default


def _newer_than_needed(evidence: Evidence) -> Iterator[Found]:
    for model in evidence.models:
        try:
            demands = demands_of(model.program)
        except OptionError:
            continue  # an opset newer than this package, which says nothing about its ops
        has = _target(model)
        needs = max((demand.opset for demand in demands), default=_OLDEST)
        if has is not None and needs < has:
            causes = [demand.what for demand in demands if demand.opset is needs]
            because = f", for {', '.join(causes)}" if causes else ""
            yield Found(
                model.name,
                None,
                f"{has.name}; {needs.name} has all that it uses{because}",
                remedy=f"Lower for {needs.name} (--deployment-target {needs.name})",
            )


def _target(model: CheckedModel) -> Opset | None:
    version = model.program.specification_version
    return Opset(version) if version in {int(opset) for opset in Opset} else None


RULES = (
    Rule(
        name="deployment-target",
        finds="a deployment target newer than anything in the model needs",
        reason="A model of opset CoreML7 does not load before iOS17 and macOS 14, and so with "
        "every opset: older systems do not know it.",
        consequence=Consequence.NEWER_SYSTEM,
        remedy="Lower for an older target",
        sources=(sources.TROUBLESHOOTING, sources.MIL_OPS),
        examine=_newer_than_needed,
        neural_engine=False,
    ),
)
