"""Undelegated ops that coremltools translates, or claims to translate.

With the records, this covers every op of coremltools that can reach a partitioner. Other ops are
decomposed before, or are arithmetic on Python numbers. Custom ops of ExecuTorch's own packages that
Core ML does not take are listed too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an op is not delegated."""

    text: str
    remedy: str | None = None


_DATA_DEPENDENT = Refusal("the shape of the result depends on values")
_GRADIENTS = Refusal("it computes gradients")
_GENERATOR = Refusal("random numbers come from a generator of the program, not from Core ML")
_PERMUTATION = Refusal("a sort of random numbers of fp16, many of them equal, favors some orders")
_UNEVEN = Refusal("coremltools rounds toward zero, so not all integers are equally likely")
_CATEGORICAL = Refusal("coremltools takes unnormalized weights for probabilities")
_COMPLEX = Refusal("Core ML has no complex numbers")
_UNSTABLE = Refusal("Core ML's sort does not keep the order of equal elements")
_BITS = Refusal("Core ML does not reinterpret the bits of a tensor")
_PACKED = Refusal("the weight is packed for a CPU kernel")
_INTEGER_BITS = Refusal("Core ML has no bitwise ops on integers")
_SLOW = Refusal("coremltools unrolls it over the dimension, an op per element")
_SINGLE = Refusal("the number has another rank than the sequence")
_ACCUMULATED = Refusal("Core ML does not choose the dtype of a product")
_ANTIALIASED = Refusal(
    "Core ML has no antialiasing when it resizes",
    remedy="Resize floats between static sizes, which becomes products with matrices",
)
_OTHER_FORM = Refusal("exported programs have another overload, which has a record or decomposes")
_PACKED_SEQUENCE = Refusal("a packed sequence has another batch at each step")
_TRAINING = Refusal("dropout at training draws random numbers")
_CPU_CACHE = Refusal(
    "it is for caches that ExecuTorch's CPU kernels write in place",
    remedy="Write the model with torch's scaled_dot_product_attention and caches that are buffers, "
    "as export-llm does, or export_llm for the backend coreml",
)
_CACHE_OUTSIDE = Refusal("it reads and writes a cache that is no input of the program")
_STEPS = Refusal("Core ML computes no recurrence but in a loop")
_CODES = Refusal("Core ML does not store weights in this format")


def _table(rows: Iterable[tuple[Refusal, str]]) -> dict[str, Refusal]:
    names = ((refusal, op) for refusal, ops in rows for op in ops.split())
    return {op if op.count(".") == 2 else f"aten.{op}": refusal for refusal, op in names}


_SUPPRESSION = replace(
    _DATA_DEPENDENT,
    remedy="Call coreml_delegate.detection.nms, whose result has a fixed number of indices",
)


REFUSED: Mapping[str, Refusal] = MappingProxyType(
    _table(
        (
            (_DATA_DEPENDENT, "nonzero.default _unique2.default repeat_interleave.Tensor"),
            (_DATA_DEPENDENT, "masked_select.default bincount.default"),
            (_DATA_DEPENDENT, "_pack_padded_sequence.default"),
            (_GRADIENTS, "convolution_backward.default max_pool2d_with_indices_backward.default"),
            (_GRADIENTS, "avg_pool2d_backward.default _adaptive_avg_pool2d_backward.default"),
            (_PACKED_SEQUENCE, "lstm.data gru.data rnn_tanh.data rnn_relu.data"),
            (_GENERATOR, "rand.generator rand_like.generator randn.generator"),
            (_GENERATOR, "randn_like.generator randint.generator randint.low_generator"),
            (_PERMUTATION, "randperm.default"),
            (_UNEVEN, "randint.default randint.low"),
            (_CATEGORICAL, "multinomial.default"),
            (_TRAINING, "native_dropout.default"),
            (_COMPLEX, "complex.default view_as_real.default"),
            (_UNSTABLE, "sort.stable"),
            (_BITS, "view.dtype view_copy.dtype"),
            (_SINGLE, "searchsorted.Scalar"),
            (_ACCUMULATED, "mm.dtype bmm.dtype addmm.dtype"),
            (_OTHER_FORM, "_convolution.default upsample_bilinear2d.default"),
            (_ANTIALIASED, "_upsample_bilinear2d_aa.default _upsample_bicubic2d_aa.default"),
            (_PACKED, "_convert_weight_to_int4pack.default _weight_int4pack_mm.default"),
            (_PACKED, "_convert_weight_to_int4pack_for_cpu.default"),
            (_PACKED, "_weight_int4pack_mm_for_cpu.default"),
            (_INTEGER_BITS, "bitwise_and.Scalar_Tensor"),
            (_SLOW, "logcumsumexp.default _logcumsumexp.default"),
            (_CPU_CACHE, "llama.custom_sdpa.default llama.custom_quantized_sdpa.default"),
            (_CPU_CACHE, "llama.sdpa_with_kv_cache.default llama.update_cache.default"),
            (_CPU_CACHE, "llama.update_cache_with_indices.default"),
            (_CACHE_OUTSIDE, "kvcache.update_and_attend.default"),
            (_CACHE_OUTSIDE, "executorch.update_cross_attn_cache.default"),
            (_STEPS, "llama.gated_delta_rule.default llama.channelwise_gated_delta_rule.default"),
            (
                _PACKED,
                "llama.quantized_moe_ffn.default quant_fusion._pack_embedding_weight.default",
            ),
            (_CODES, "torchao.dequantize_gguf.default torchao.dequantize_int4_tensor.default"),
            (_CODES, "torchao.dequantize_mx.default torchao.dequantize_nvfp4.default"),
            (_DATA_DEPENDENT, "preprocess.tile_crop.default"),
        )
    )
    | {"torchvision.nms.default": _SUPPRESSION}
)
"""Every refused op by target name."""
