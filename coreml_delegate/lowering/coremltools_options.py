"""Compile options as keywords of ``coremltools.convert``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coreml_delegate.compile_options import CompileOptions, ModelType, Precision
from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.lowering.compression import compression_passes
from coreml_delegate.lowering.fp16 import fp16_selector
from coreml_delegate.third_party import coremltools

# With fp16 this pass narrows integers in gather, squeeze and top-k to 16 bits, signed or unsigned,
# for any values: apple/coremltools#2222, apple/coremltools#2626.
_EXCLUDED_PASSES = {"common::add_int16_cast"}


def check_accepted(options: CompileOptions) -> None:
    """Check that coremltools accepts the options.

    Raises:
        OptionError: Coremltools does not know a graph pass or MIL op, or does not take a
            compression of weights.
    """
    ct = coremltools()
    _pipeline(ct, options)
    _precision(ct, options, frozenset())
    compression_passes(ct, options)


def convert_keywords(ct: Any, options: CompileOptions, in_fp32: frozenset[int]) -> dict[str, Any]:
    """Return the keywords for ``coremltools.convert``.

    Args:
        ct: Coremltools.
        options: How to lower.
        in_fp32: Debug handles of the calls that stay in fp32.

    Raises:
        OptionError: Coremltools does not know a graph pass or MIL op.
    """
    target = options.deployment_target
    return {
        "source": "pytorch",
        "convert_to": "mlprogram",
        "minimum_deployment_target": None if target is None else ct.target(int(target)),
        "compute_units": ct.ComputeUnit[options.compute_unit.name],
        "pass_pipeline": _pipeline(ct, options),
        "compute_precision": _precision(ct, options, in_fp32),
        # Ahead-of-time compilation needs loading, which is only possible with Core ML.
        "skip_model_load": options.model_type is not ModelType.COMPILED_MODEL,
    }


def _precision(ct: Any, options: CompileOptions, in_fp32: frozenset[int]) -> Any:
    """Return coremltools' precision, or its fp16 transform if ops stay in fp32."""
    keep = options.keep_fp32
    if options.precision is not Precision.FLOAT16 or not (keep.ops or in_fp32):
        return ct.precision(options.precision.value)
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    core_ops = SSAOpRegistry.core_ops
    for name in keep.ops:
        if name not in core_ops:
            raise OptionError(
                "keep_fp32 names an unknown MIL op",
                got=repr(name),
                expected=near_matches(name, core_ops, ""),
            )
    return ct.transform.FP16ComputePrecision(op_selector=fp16_selector(keep, in_fp32))


def _pipeline(ct: Any, options: CompileOptions) -> Any:
    if options.pass_names is not None:
        return pass_pipeline(options.pass_names)
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(_EXCLUDED_PASSES)
    return pipeline


def pass_pipeline(pass_names: Sequence[str]) -> Any:
    """Return coremltools' ``PassPipeline`` with these passes.

    Raises:
        OptionError: A pass is unknown.
    """
    ct = coremltools()
    passes = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY.passes
    for name in pass_names:
        if name not in passes:
            raise OptionError(
                "unknown coremltools pass",
                got=repr(name),
                expected=near_matches(name, passes, ""),
            )
    return ct.PassPipeline(list(pass_names), pipeline_name="coreml_delegate")
