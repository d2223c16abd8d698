"""Rules on weights: larger than necessary, stored twice, or in a costly format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView
from coreml_delegate.device_check.records import (
    CheckedModel,
    Consequence,
    Details,
    Evidence,
    Place,
    Rewrite,
    Rule,
    each_function,
    view_details,
)
from coreml_delegate.mil.compose.compressed import index_bits
from coreml_delegate.mil.passes.for_devices import (
    SMALLEST,
    distinct_values,
    numbers_for_equal_values,
    table_bytes,
    tables_of_few_values,
)
from coreml_delegate.partition.grouping.stages import cut
from coreml_delegate.quantization.weight_inventory import DENSE, StoredWeight
from coreml_delegate.runtime.engines.base import Array
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.targets import LARGEST_WEIGHTS, Device

WORTH = 0.001
"""Smallest saving that is a finding, as a fraction of all weights of a program."""

_WEIGHT = "weight"
_BLOCKWISE = "constexpr_blockwise_shift_scale"
_NARROW_IN_SPEC = ("int8", "uint8")  # other integers are varints in the specification
_NARROW = (*_NARROW_IN_SPEC, "int16", "uint16")


def _each_weight(
    look: Callable[[StoredWeight], tuple[str, int] | None],
    applies: Callable[[CheckedModel], bool] = lambda _: True,
) -> Callable[[Evidence], Iterator[Details]]:
    """Return an examination that applies ``look`` to each dense weight of at least ``SMALLEST``.

    Args:
        look: Returns the observed value as text and the bytes that could be saved, or None.
        applies: Whether to examine the weights of a model.
    """

    def examine(evidence: Evidence) -> Iterator[Details]:
        least = _least_saving(evidence)
        for model in filter(applies, evidence.models):
            for weight in model.weights:
                if weight.scheme != DENSE or weight.stored_bytes < SMALLEST:
                    continue
                result = look(weight)
                if result is not None and result[1] > least:
                    place = Place(_WEIGHT, weight.name)
                    yield Details(model.name, None, result[0], (place,), result[1])

    return examine


def _least_saving(evidence: Evidence) -> float:
    """Return the smallest saving in bytes that is a finding."""
    return WORTH * sum(w.stored_bytes for model in evidence.models for w in model.weights)


def _data(weight: StoredWeight) -> Array:
    """Return the stored elements of a dense weight."""
    data = weight.constants[0].data
    return data if isinstance(data, np.ndarray) else np.empty(0)


def _computes_in_fp16(model: CheckedModel) -> bool:
    return any(DType.FP16 in view.function.computed_in() for view in model.views)


def _wide_floats(weight: StoredWeight) -> tuple[str, int] | None:
    if weight.stored_as != DType.FP32.label:
        return None
    return f"fp32{list(weight.shape)}", weight.stored_bytes // 2


def _wide_integers(view: FunctionView) -> Iterator[Details]:
    for name, constant in view.constants.items():
        data = constant.data
        if not isinstance(data, np.ndarray) or data.dtype.kind not in "iu" or not data.size:
            continue
        low, high = int(data.min()), int(data.max())
        kinds = _NARROW_IN_SPEC if constant.offset is None else _NARROW
        narrow = next((kind for kind in kinds if _fits(kind, low, high)), None)
        if narrow is None:
            continue
        stored = _varint_bytes(data) if constant.offset is None else data.nbytes
        saved = stored - data.size * np.dtype(narrow).itemsize
        if stored >= SMALLEST and saved > 0:
            got = f"{data.size:,} {data.dtype.name} from {low} to {high}, fit {narrow}"
            place = Place(_WEIGHT, name)
            yield Details(view.delegate, view.function.name, got, (place,), saved)


def _fits(kind: str, low: int, high: int) -> bool:
    limits = np.iinfo(kind)
    return limits.min <= low and high <= limits.max


def _varint_bytes(data: Array) -> int:
    """Return the size of integers as protobuf varints.

    A byte holds 7 bits; negative numbers are written as 64 bits, in 10 bytes.
    """
    wide = data.astype(np.int64).reshape(-1)
    sizes = np.ones(wide.size, np.int64)
    for bits in range(7, 63, 7):
        sizes += wide >= 1 << bits
    return int(np.where(wide < 0, 10, sizes).sum())


def _equal_values(weight: StoredWeight) -> tuple[str, int] | None:
    data = _data(weight)
    flat = data.reshape(-1)
    if not flat.size or flat[0] != flat[-1] or not (flat == flat[0]).all():
        return None
    return f"{flat.size:,} times {float(flat[0]):g}", weight.stored_bytes - data.itemsize


def _few_values(weight: StoredWeight) -> tuple[str, int] | None:
    data = _data(weight)
    values = distinct_values(data)
    if values is None:
        return None
    bits = index_bits(len(values))
    saved = weight.stored_bytes - table_bytes(data, len(values))
    return f"{len(values)} different values, {bits} bits with a table", saved


def _duplicates(evidence: Evidence) -> Iterator[Details]:
    least = _least_saving(evidence)
    by_size: dict[int, list[tuple[CheckedModel, StoredWeight]]] = {}
    for model in evidence.models:
        for weight in model.weights:
            if weight.stored_bytes >= SMALLEST:
                by_size.setdefault(weight.stored_bytes, []).append((model, weight))
    for candidates in by_size.values():
        duplicates = map(_duplicate, _with_equal_bytes(candidates))
        yield from (details for details in duplicates if details.saved_bytes > least)


def _with_equal_bytes(
    candidates: Iterable[tuple[CheckedModel, StoredWeight]],
) -> Iterator[list[tuple[CheckedModel, StoredWeight]]]:
    listed = list(candidates)
    if len(listed) < 2:
        return
    equal: dict[bytes, list[tuple[CheckedModel, StoredWeight]]] = {}
    for model, weight in listed:
        digest = hashlib.blake2b(repr((weight.scheme, weight.stored_as)).encode())
        for constant in weight.constants:
            stored = constant.stored
            if isinstance(stored, np.ndarray):
                digest.update(np.ascontiguousarray(stored).view(np.uint8).data)
        equal.setdefault(digest.digest(), []).append((model, weight))
    yield from (group for group in equal.values() if len(group) > 1)


def _duplicate(group: list[tuple[CheckedModel, StoredWeight]]) -> Details:
    nbytes = group[0][1].stored_bytes
    names = list(dict.fromkeys(model.name for model, _ in group))
    is_several = len(names) > 1
    places = tuple(
        Place(_WEIGHT, f"{model.name}: {weight.name}" if is_several else weight.name)
        for model, weight in group
    )
    remedy = (
        "Lower the methods with weights shared (generate_multimethod_weight_sharing_strategy_"
        "compile_spec), or avoid the splits between partitions of one method (see the report)"
        if is_several
        else None
    )
    return Details(
        ", ".join(names),
        None,
        f"{len(group)} times {nbytes:,} bytes",
        places,
        (len(group) - 1) * nbytes,
        remedy,
    )


def _large_files(evidence: Evidence) -> Iterator[Details]:
    for model in evidence.models:
        total = sum(weight.stored_bytes for weight in model.weights)
        if total >= LARGEST_WEIGHTS:
            yield Details(model.name, None, f"{total:,} bytes")


def _blocks(view: FunctionView) -> Iterator[Details]:
    places: list[Place] = []
    for op in view.locations:
        scale = view.array(op, "scale") if op.type == _BLOCKWISE else None
        # A scale per row is per channel; a block is a part of a row.
        if scale is not None and sum(size > 1 for size in scale.shape) > 1:
            places.append(Place(_WEIGHT, op.outputs[0].name))
    if places:
        got = f"{len(places)} with several scales in a row"
        yield view_details(view, got, places)


RULES = (
    Rule(
        name="large-file",
        finds="weights of 2 GB and more in one model",
        reason="A model whose weight file exceeds about 2^31 bytes was converted, and failed when "
        "it was loaded (reported in March 2023).",
        consequence=Consequence.FAILS,
        remedy="Compress the weights (export --quantize), or lower the model in parts",
        sources=(sources.LARGE_FILE,),
        examine=_large_files,
        neural_engine=False,
        rewrite=Rewrite(tuple(Device), (cut,)),
    ),
    Rule(
        name="blockwise-weights",
        finds="weights quantized in blocks",
        reason="ExecuTorch's Llama example quantizes weights by block or by channel, and states "
        "that the neural engine requires channels.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Quantize with one scale for each output channel, or by palettes",
        sources=(sources.LLAMA,),
        examine=each_function(_blocks),
    ),
    Rule(
        name="fp32-weights",
        finds="weights stored in fp32 in a program that computes in fp16",
        reason="The precision of the weights in an ML program is that of its computation, fp16 by "
        "default; fp32 takes twice the bytes.",
        consequence=Consequence.LARGER_FILE,
        remedy="Leave the ops that take them out of keep_fp32",
        sources=(sources.PRECISION,),
        examine=_each_weight(_wide_floats, _computes_in_fp16),
        neural_engine=False,
    ),
    Rule(
        name="wide-integers",
        finds="constant integers of 32 bits that take more room than narrower ones",
        reason="Since iOS17 gather and other ops take integers of 8 and 16 bits.",
        consequence=Consequence.LARGER_FILE,
        remedy="Store the table in a narrower type, and lower for iOS17",
        sources=(sources.MIL_OPS,),
        examine=each_function(_wide_integers),
        neural_engine=False,
    ),
    Rule(
        name="equal-values",
        finds="a constant tensor of one value",
        reason="MIL has ops that repeat a value, fill and the broadcasts of elementwise ops; a "
        "constant is stored with every element.",
        consequence=Consequence.LARGER_FILE,
        remedy="Use a scalar, or a tensor of sizes 1 that broadcasts; leave a bias of zeros out",
        sources=(sources.MIL_OPS,),
        examine=_each_weight(_equal_values),
        neural_engine=False,
        rewrite=Rewrite(
            tuple(Device), (numbers_for_equal_values,), "where an operation broadcasts"
        ),
    ),
    Rule(
        name="few-values",
        finds="a weight of so few values that a lookup table holds it exactly",
        reason="A table of n bits has 2^n entries, and a weight is stored as indices into it: "
        "weights of no more values lose nothing.",
        consequence=Consequence.LARGER_FILE,
        remedy="Palettize the weight, from iOS16 on (weight_compression by palettize_weights in "
        "mode unique)",
        sources=(sources.PALETTES,),
        examine=_each_weight(_few_values),
        neural_engine=False,
        rewrite=Rewrite(
            tuple(Device),
            (tables_of_few_values,),
            "from iOS16 on, if all operations that read it take tables",
        ),
    ),
    Rule(
        name="duplicate-weights",
        finds="weights of equal bytes that are stored several times",
        reason="Functions of one model share weights; models do not. Core ML Tools finds equal "
        "weights by a hash when it merges models.",
        consequence=Consequence.LARGER_FILE,
        remedy="Use one parameter in the model for both",
        sources=(sources.MULTIFUNCTION,),
        examine=_duplicates,
        neural_engine=False,
    ),
)
