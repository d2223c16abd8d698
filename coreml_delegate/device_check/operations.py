"""Rules on operations that the neural engine does not run, runs wrongly or runs slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import numpy as np

from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView, operands
from coreml_delegate.device_check.records import (
    Consequence,
    Details,
    Evidence,
    Place,
    Rewrite,
    Rule,
    each_function,
    each_value,
    obstacle_to_leaving,
    view_details,
)
from coreml_delegate.mil.passes.for_devices import (
    BATCHED_RANK,
    FAST_POOL_STRIDES,
    LARGE_BATCH,
    bound_masks,
    decompose_attention,
    fast_pool_strides,
    is_smooth,
    separate_scores,
    strides_to_channels,
)
from coreml_delegate.partition.grouping.moved_calls import moved_calls
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Binding, Constant, Op, Ref
from coreml_delegate.targets import MOST_ROWS, ComputeUnit, Device

_TOPK = "topk"
_RECURRENT = frozenset({"gru", "lstm", "rnn"})
_ATTENTION = "scaled_dot_product_attention"
_PRODUCT = "matmul"
_GPU = frozenset({None, ComputeUnit.ALL, ComputeUnit.CPU_AND_GPU})
_SOFTMAX = frozenset({"softmax", _ATTENTION})
_CONVOLUTIONS = frozenset({"conv"})
_POOLS = frozenset({"avg_pool", "l2_pool", "max_pool"})
# Ops through which infinity reaches a softmax.
_PROPAGATES_INFINITY = frozenset(
    {
        *("add", "cast", "concat", "expand_dims", "identity", "maximum", "minimum", "mul"),
        *("real_div", "reshape", "select", "slice_by_index", "slice_by_size", "squeeze", "sub"),
        *("tile", "transpose"),
    }
)


def _topk(view: FunctionView) -> Iterator[tuple[str, Place]]:
    """Yield the topk ops, by whether their results are only outputs of the function."""
    for op in view.ops:
        if op.type == _TOPK:
            is_last = all(_is_only_output(view, output.name) for output in op.outputs)
            got = "at the end of the model" if is_last else "its results are used in the model"
            yield got, Place.of(view, op)


def _is_only_output(view: FunctionView, name: str) -> bool:
    """Whether only casts of outputs use a value."""
    return all(
        user.type == "cast" and not any(view.users.get(o.name) for o in user.outputs)
        for user in view.users.get(name, ())
    )


def _recurrent(view: FunctionView) -> Iterator[tuple[str, Place]]:
    return ((op.type, Place.of(view, op)) for op in view.ops if op.type in _RECURRENT)


def _attention(view: FunctionView) -> Iterator[Details]:
    places = [Place.of(view, op) for op in view.ops if op.type == _ATTENTION]
    if places:
        yield view_details(view, f"{len(places)} {_ATTENTION}", places)


def _attention_on_gpu(evidence: Evidence) -> Iterator[Details]:
    for model in evidence.models:
        for view in model.on(_GPU).views:
            places = [Place.of(view, op) for op in view.ops if _is_biased_attention(view, op)]
            if places:
                got = f"{len(places)} in fp32 with a batch of {LARGE_BATCH} or more"
                yield view_details(view, got, places)


def _is_biased_attention(view: FunctionView, op: Op) -> bool:
    """Whether an op is the softmax in ``softmax(Q K^T + bias) V`` of a large batch in fp32."""
    kind = view.tensor_of(Ref(op.outputs[0].name)) if op.type == "softmax" else None
    if kind is None or kind.dtype is not DType.FP32 or kind.shape is None:
        return False
    if len(kind.shape) != BATCHED_RANK:
        return False
    bias = _producer(view, op, "x", "add")
    if bias is None or not any(_producer(view, bias, side, _PRODUCT) for side in ("x", "y")):
        return False
    batch = kind.shape[0]
    users = view.users.get(op.outputs[0].name, ())
    return (batch is None or batch >= LARGE_BATCH) and any(u.type == _PRODUCT for u in users)


def _producer(view: FunctionView, op: Op, operand: str, op_type: str) -> Op | None:
    """Return the producer of an operand if it has a type, or None."""
    binding = op.inputs[operand][0]
    producer = view.producers.get(binding.name) if isinstance(binding, Ref) else None
    return producer if producer is not None and producer.type == op_type else None


def _wide_gathers(view: FunctionView) -> Iterator[tuple[str, Place]]:
    for op in view.ops:
        rows = _rows(view, op)
        # Of constant indices only the largest matters.
        indices = view.array(op, "indices")
        largest = rows - 1 if indices is None else int(indices.max(initial=0))
        if largest >= MOST_ROWS:
            yield f"{rows:,} rows", Place.of(view, op)


def _rows(view: FunctionView, op: Op) -> int:
    """Return the size of the axis that a gather reads; 0 for another op or an unknown size."""
    bindings = op.inputs.get("x", ()) if op.type == "gather" else ()
    kind = view.tensor_of(bindings[0]) if len(bindings) == 1 else None
    constant = view.array(op, "axis")
    if kind is None or not kind.shape:
        return 0
    axis = 0 if constant is None or constant.size != 1 else int(constant.item())
    return kind.shape[axis] or 0 if -len(kind.shape) <= axis < len(kind.shape) else 0


def _infinite_masks(view: FunctionView) -> Iterator[Details]:
    infinite: set[str] = set()
    places: list[Place] = []
    for op in view.ops:
        # None of these ops takes weights, which would be slow to search.
        if op.type not in _PROPAGATES_INFINITY | _SOFTMAX:
            continue
        if not any(_is_infinite(view, binding, infinite) for binding in operands(op)):
            continue
        if op.type in _SOFTMAX:
            places.append(Place.of(view, op))
        else:
            infinite.update(output.name for output in op.outputs)
    if places:
        yield view_details(view, "infinity in a mask", places)


def _is_infinite(view: FunctionView, binding: Binding, computed: Set[str]) -> bool:
    if isinstance(binding, Ref) and binding.name in computed:
        return True
    constant = binding if isinstance(binding, Constant) else view.constants.get(binding.name)
    data = None if constant is None else constant.data
    return isinstance(data, np.ndarray) and data.dtype.kind == "f" and bool(np.isinf(data).any())


def _slow_strides(ops: Set[str], is_slow: Callable[[int], bool]) -> Callable[[Evidence], Any]:
    """Return an examination of strides in ``ops``."""

    def look(view: FunctionView) -> Iterator[tuple[str, Place]]:
        for op in view.ops:
            strides = view.array(op, "strides") if op.type in ops else None
            if strides is not None and any(map(is_slow, strides.reshape(-1).tolist())):
                yield f"strides {strides.reshape(-1).tolist()}", Place.of(view, op)

    return each_value(look)


RULES = (
    Rule(
        name="topk",
        finds="a topk op",
        reason="Compute plans of fp16 detectors on an M3 Pro have topk, and the ops that use its "
        "indices, on the CPU, everything else on the neural engine. On an iPhone 17 Pro one topk "
        "costs 1.75 ms beside a model on the neural engine, and 0.05 ms on the GPU.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Return the input of topk, and select outside of the model, or leave topk to "
        "ExecuTorch's CPU kernel (export --skip-op topk)",
        sources=(sources.TOPK_PLAN, sources.TOPK_TIME),
        examine=each_value(_topk),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (moved_calls,),
            "if it splits no partition",
            obstacle_to_leaving,
        ),
    ),
    Rule(
        name="recurrent",
        finds="an RNN, GRU or LSTM op",
        reason="An engineer of Apple's states that RNN and LSTM ops are not supported on the "
        "neural engine.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Expect these on the CPU, or use convolutions or attention in their place",
        sources=(sources.RECURRENT,),
        examine=each_value(_recurrent),
    ),
    Rule(
        name="fused-attention",
        finds="scaled_dot_product_attention",
        reason="iOS 26 has a bug in its implementation of this op on the neural engine; "
        "ExecuTorch's Llama is written as matrix products and softmax instead.",
        consequence=Consequence.LESS_EXACT,
        remedy="Lower for iOS17, where attention becomes matrix products and softmax",
        sources=(sources.ATTENTION, sources.LLAMA),
        examine=each_function(_attention),
        rewrite=Rewrite((Device.NEURAL_ENGINE,), (decompose_attention,)),
    ),
    Rule(
        name="gpu-attention",
        finds=f"products, a bias and a softmax in fp32 for a batch of {LARGE_BATCH} or more",
        reason="Core ML fuses decomposed attention into one GPU kernel, whose results were right "
        "for a batch of 9 and wrong for 10 (reported in February 2026).",
        consequence=Consequence.FAILS,
        remedy="Lower for a compute unit without the GPU, or split the scores and concatenate them "
        "before the softmax, so that nothing is fused",
        sources=(sources.GPU_ATTENTION,),
        examine=_attention_on_gpu,
        neural_engine=False,
        rewrite=Rewrite((Device.GPU,), (separate_scores,)),
    ),
    Rule(
        name="wide-gather",
        finds=f"a gather from more than {MOST_ROWS:,} rows by computed indices",
        reason="Core ML converts token indices to uint16 when they are looked up on the neural "
        "engine, which does not work with the vocabulary of Llama 3.",
        consequence=Consequence.FAILS,
        remedy="Leave the embedding to the CPU (export --skip-op embedding)",
        sources=(sources.EMBEDDING,),
        examine=each_value(_wide_gathers),
        rewrite=Rewrite((Device.NEURAL_ENGINE,), (moved_calls,), "for embeddings and index_select"),
    ),
    Rule(
        name="infinite-mask",
        finds="infinity in the input of a softmax",
        reason="The hardware of the neural engine does not handle infinity correctly in softmax; "
        "Apple masks with -40000.",
        consequence=Consequence.LESS_EXACT,
        remedy="Mask with -40000 in place of -inf",
        sources=(sources.AUTHORING_RULES,),
        examine=each_function(_infinite_masks),
        rewrite=Rewrite((Device.NEURAL_ENGINE,), (bound_masks,)),
    ),
    Rule(
        name="conv-stride",
        finds="a convolution whose stride has other prime factors than 2 and 3",
        reason="Strides of twos and threes map efficiently to the neural engine; other values "
        "introduce overhead.",
        consequence=Consequence.SLOWER,
        remedy="Use strides of 2, 3, 4, 6, 8, 9, 12, 16, 24 or 32; this needs training",
        sources=(sources.AUTHORING_RULES,),
        examine=_slow_strides(_CONVOLUTIONS, lambda n: not is_smooth(n)),
        rewrite=Rewrite((Device.NEURAL_ENGINE,), (strides_to_channels,), "without dilation"),
    ),
    Rule(
        name="pool-stride",
        finds="pooling with a stride other than 1, 2 and 4",
        reason="Pooling with a stride of 2 or 4 is efficient on the neural engine; other values, "
        "as 3 and 5, introduce overhead.",
        consequence=Consequence.SLOWER,
        remedy="Use a stride of 2 or 4; this needs training",
        sources=(sources.AUTHORING_RULES,),
        examine=_slow_strides(_POOLS, lambda n: n not in FAST_POOL_STRIDES),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (fast_pool_strides,),
            "for windows that do not overlap, in steps of 2 and 4",
        ),
    ),
)
