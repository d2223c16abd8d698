"""Load a compiled function from the cache, or translate it and let OpenVINO compile it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.errors import EngineUnavailableError, UnsupportedOpError
from coreml_delegate.options.engine_options import EngineOptions, Precision
from coreml_delegate.runtime.engines.base import CompiledFunction
from coreml_delegate.runtime.engines.limits import require_memory
from coreml_delegate.runtime.engines.openvino import translate
from coreml_delegate.runtime.engines.openvino.graph import make_model
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE, fusion
from coreml_delegate.runtime.engines.openvino.session.compiled_cache import CompiledCache
from coreml_delegate.runtime.engines.openvino.session.inference import PROFILING, OpenVinoFunction
from coreml_delegate.runtime.engines.openvino.session.static_graphs import (
    EnumeratedFunction,
    Shapes,
    first_shapes,
    fix_shapes,
)
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.op_errors import last_line
from coreml_delegate.runtime.threads import cpu_count

_logger = logging.getLogger(__name__)

# The property of a compiled model for the element type that it computes in.
_PRECISION_HINT: Final = "INFERENCE_PRECISION_HINT"
# The property that allows integer kernels between fake-quantizes.
_INTEGER_KERNELS: Final = "LP_TRANSFORMS_MODE"
# The property that allows one generated kernel for a chain of elementwise operations.
_GENERATED_KERNELS: Final = "SNIPPETS_MODE"
# Activations per scale, where they are quantized at each call; OpenVINO's own default.
_QUANTIZED_GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class _Mode:
    """OpenVINO's names of a precision: the hint, and the capability of CPUs that support it."""

    hint: str
    capability: str


_MODES: Final[Mapping[Precision, _Mode]] = {
    # Explicit, because without a hint OpenVINO uses bf16 if the CPU has matrix units for it.
    Precision.F32: _Mode("f32", "FP32"),
    # Softmax and norms stay accurate: their kernels read and write bf16 and compute in fp32.
    Precision.BF16: _Mode("bf16", "BF16"),
}


# Bytes of operands and results up to which a node is not checked against free memory.
_FREE_BYTES: Final = 1 << 28


def unsupported(function: Function) -> list[str]:
    """Return one reason for each op of ``function`` without a translation."""
    return translate.unsupported(fix_shapes(function, first_shapes(function)))


def compile_function(
    core: Any, function: Function, options: EngineOptions, source: ProgramSource | None
) -> CompiledFunction:
    """Compile ``function`` by OpenVINO's ``core``, or load it from the cache; see ``Engine``.

    Raises:
        UnsupportedOpError: An op, or a mode or type of it, has no translation.
        EngineUnavailableError: The CPU does not support the precision of ``options``.
        ExecutionError: A node of the graph does not fit into memory.
    """
    mode = _MODES[Precision(options.precision)]
    _require_precision(core, mode)
    config = _config(options, mode, function)
    cache = CompiledCache.of(core, function, source, options, config)
    build = functools.partial(_build, core, function, options, config, cache)
    shapes = first_shapes(function)
    return EnumeratedFunction(function, build) if shapes else build(shapes)


def _build(
    core: Any,
    function: Function,
    options: EngineOptions,
    config: Mapping[str, object],
    cache: CompiledCache | None,
    shapes: Shapes,
) -> OpenVinoFunction:
    if cache is not None and (cached := cache.find(core, shapes)) is not None:
        _logger.debug("loaded %s %s from the cache", function.name, shapes or "")
        return cached
    translated = translate.translate(
        fix_shapes(function, shapes), exact_nan=options.exact_nan, labelled=options.profiling
    )
    fusion.rewrite_for_plugin(translated.model)
    _require_memory(translated.model)
    try:
        compiled = _compile(core, translated.model, config)
    except (RuntimeError, MemoryError) as error:
        raise UnsupportedOpError(
            "OpenVINO cannot compile the function", got=last_line(error)
        ) from error
    _logger.debug(
        "compiled %s %s: %d nodes", function.name, shapes or "", len(translated.model.get_ops())
    )
    # Constants of the compiled model may lie in the memory of the program's constants.
    result = OpenVinoFunction(translated.interface, compiled, config, core=core, keep=function)
    if cache is not None:
        cache.keep(result, shapes)
    return result


def _compile(core: Any, model: Any, config: Mapping[str, object]) -> Any:
    try:
        return core.compile_model(model, DEVICE, config)
    except RuntimeError as error:
        # A generated kernel can have more values at once than the CPU has registers.
        _logger.info("compiled without generated kernels: %s", last_line(error))
        return core.compile_model(model, DEVICE, {**config, _GENERATED_KERNELS: "DISABLE"})


def _config(options: EngineOptions, mode: _Mode, function: Function) -> dict[str, object]:
    config: dict[str, object] = {
        _PRECISION_HINT: mode.hint,
        "PERFORMANCE_HINT": "LATENCY",
        # OpenVINO's own default quantizes activations where weights are compressed integers.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _QUANTIZED_GROUP if options.dynamic_quantization else 0,
    }
    if options.profiling:
        config[PROFILING] = True
    if options.threads == 1 and not options.profiling:
        # One stream per CPU, one thread per stream: concurrent calls run in parallel.
        config["INFERENCE_NUM_THREADS"] = config["NUM_STREAMS"] = cpu_count()
    elif options.threads is not None:
        config["INFERENCE_NUM_THREADS"] = options.threads
    if any(op.type == "quantize" for op in function.block.walk()) and int8_sums_saturate():
        config[_INTEGER_KERNELS] = "NO"
        _log_float_fallback(mode.hint)
    return config


def _require_precision(core: Any, mode: _Mode) -> None:
    """Refuse a precision that OpenVINO would silently replace.

    Raises:
        EngineUnavailableError: This CPU does not support the precision.
    """
    capabilities = core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if mode.capability in capabilities:
        return
    if not emulates_precision(mode.hint):
        raise EngineUnavailableError(
            f"this CPU does not compute in {mode.hint}",
            got=", ".join(capabilities),
            expected=mode.capability,
            remedy=f"Use precision={Precision.F32.value!r}",
        )
    _log_emulated(mode.hint)


@functools.cache
def emulates_precision(hint: str) -> bool:
    """Whether OpenVINO computes in a precision although the CPU has no instructions for it.

    The hint of a compiled model shows it: a CPU with AVX-512 emulates bf16.
    """
    x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([1]))
    compiled = _compile_probe(ops.result(x), x, hint)
    return compiled.get_property(_PRECISION_HINT).to_string() == hint


@functools.cache
def int8_sums_saturate() -> bool:
    """Whether sums of products of 8-bit integers saturate at 16 bits on this CPU.

    x86 without VNNI (AMD before Zen 4, Intel before Cascade Lake) adds pairs of products in 16 bits
    (``vpmaddubsw``).
    """
    largest = np.full((1, 2), 255, np.float32)
    x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([1, 2]))
    low, high = ops.constant(np.float32(0)), ops.constant(np.float32(255))
    codes = ops.fake_quantize(x, low, high, low, high, 256)
    weight = ops.convert(ops.constant(np.full((2, 2), 127, np.int8)), "f32")
    scaled = ops.multiply(weight, ops.constant(np.float32(1)))
    product = ops.result(ops.matmul(codes, scaled, False, True))
    (sums,) = _compile_probe(product, x, "f32")([largest]).values()
    return bool((sums != 2 * 255 * 127).any())


def _compile_probe(result: Any, x: Any, hint: str) -> Any:
    model = make_model([result], [x], "probe")
    return ov.Core().compile_model(model, DEVICE, {_PRECISION_HINT: hint})


@functools.cache
def _log_emulated(hint: str) -> None:
    _logger.warning(
        "this CPU has no instructions for %s: it is emulated, and slower than f32", hint
    )


@functools.cache
def _log_float_fallback(hint: str) -> None:
    _logger.info(
        "sums of int8 products saturate on this CPU (it has no VNNI): "
        "quantized programs are computed in %s, exactly and more slowly",
        hint,
    )


def _require_memory(model: Any) -> None:
    """Refuse a model with a node whose operands and results do not fit into memory at once.

    Nodes with sizes known only at run time are not checked.

    Raises:
        ExecutionError: A node does not fit.
    """
    for node in model.get_ops():
        values = [*node.outputs(), *(port.get_source_output() for port in node.inputs())]
        fixed = (value for value in values if value.get_partial_shape().is_static)
        nbytes = sum(value.get_tensor().size for value in fixed)
        if nbytes > _FREE_BYTES:
            require_memory(nbytes, f"{node.get_type_name()} {node.get_friendly_name()!r}")
