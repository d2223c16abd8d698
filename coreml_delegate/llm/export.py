"""Export of a decoder to a ``.pte``: quantized weights, exported methods, lowering.

``decoder_methods.py`` has the methods. With a selection (``candidates.py``) they return tokens in
place of logits. Each adapter has the same methods again, with its name as a suffix, and shares the
decoder's weights.

For a model that reads images, the methods take embeddings in place of tokens. Two more methods
compute them, of an image and of tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.decoder_methods import (
    Decode,
    Forward,
    Prefill,
    StandardEmbedding,
    StandardForward,
    keep_sizes_static,
)
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.experts import LastLayers, routers, sort_choices
from coreml_delegate.llm.layout import TOKEN_EMBEDDING, CacheKind, Layout
from coreml_delegate.llm.low_rank import Adapter, attached
from coreml_delegate.llm.neural_engine import NeuralEngineDecoder, NeuralEngineForward
from coreml_delegate.llm.stored_weights import in_memory, read_weights
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.patches.third_party import quiet_import, wrap_errors

# The stubs of torch do not have int4.
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("int4", "int8")}

_ATEN: Any = torch.ops.aten
_CHECKS = (_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default)

_CHUNK = 2**24  # elements quantized at a time


def quantize_weights(
    decoder: Decoder | EncoderDecoder, *, linear: str, embedding: str, group: int
) -> None:
    """Quantize weights in place; activations stay in floating point.

    Modules that share the embedding's weight, such as the head, are quantized as the embedding.
    Routers of experts are not quantized.

    Args:
        decoder: The model, which is changed.
        linear: ``int4`` with a scale per group of inputs of each output, ``int8`` with a scale per
            output (of each expert), or ``none``.
        embedding: ``int8`` with a scale per token, or ``none``.
        group: Number of inputs in a group; divides the inputs of every linear layer.

    Raises:
        OptionError: ``group`` does not divide the inputs of a layer.
    """
    table: Any = decoder.embedding.weight
    vocabulary = [m for m in decoder.modules() if getattr(m, "weight", None) is table]
    excluded = {*vocabulary, *routers(decoder)}
    linears = {
        name: module
        for name, module in decoder.language_modules()
        if isinstance(module, nn.Linear) and module not in excluded
    }
    if linear != "none":
        size = group if linear == "int4" else 0
        if size:
            _check_groups(linears, size)
        for module in linears.values():
            own = module.inputs if isinstance(module, LastLayers) else 0
            _replace_weight([module], _quantize(module.weight, linear, size or own))
    if embedding != "none":
        _replace_weight(vocabulary, _quantize(table, embedding, 0))


def export_methods(
    decoder: Decoder,
    layout: Layout,
    adapters: Sequence[Adapter] = (),
    *,
    cache_dtype: torch.dtype = torch.float32,
) -> dict[str, ExportedProgram]:
    """Export the methods in ATen dialect; they share the decoder's weights.

    Args:
        decoder: In eval mode; its weights are read into memory.
        layout: Kind of the caches, chunk and context, and names of the adapters.
        adapters: The adapters, in the order of their names.
        cache_dtype: Of caches that are not Core ML states, whose dtype is Core ML's.

    Raises:
        OptionError: ``layout.replaced`` differs from ``decoder.replaced``.
        LoweringError: ``torch.export`` cannot capture the model.
        OptionError: The layout selects more tokens than the vocabulary has.
    """
    if layout.selection is not None:
        layout.selection.check(layout.vocabulary)
    replaced = decoder.replaced if layout.cache is CacheKind.IO else ()
    if layout.replaced != replaced:
        raise OptionError(
            "the layout is not the decoder's",
            got=f"replaced caches {layout.replaced}",
            expected=str(replaced),
        )
    read_weights(decoder)
    exported: dict[str, ExportedProgram] = {}
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        input_modules = decoder.input_modules(layout.chunk)
        for method, (module, example) in zip(layout.input_methods, input_modules, strict=True):
            if method == TOKEN_EMBEDDING:
                module = StandardEmbedding(decoder.embedding, layout.chunk)
            exported[method] = _export(module, (example,), layout)
        for adapter in (None, *adapters):
            name = None if adapter is None else adapter.name
            modules = _method_modules(decoder, layout, name, cache_dtype)
            with attached(decoder, adapter):
                for method, (module, inputs) in zip(layout.methods_of(name), modules, strict=True):
                    exported[method] = _export(module, inputs, layout)
    for program in exported.values():
        sort_choices(program)
        _drop_unread_numbers(program)
        if layout.image is not None:
            drop_unused_buffers(program)
    return exported


def _export(module: nn.Module, inputs: tuple[torch.Tensor, ...], layout: Layout) -> ExportedProgram:
    """Export a method; tokens of standard methods have a range of sizes."""
    if not isinstance(module, StandardForward | StandardEmbedding):
        return torch.export.export(module.eval(), inputs)
    sizes = [None] * (len(inputs) - 1)
    count = Dim("tokens", max=layout.chunk) if layout.chunk > 1 else 1
    program = torch.export.export(module.eval(), inputs, dynamic_shapes=({1: count}, *sizes))
    keep_sizes_static(program)
    return program


def _method_modules(
    decoder: Decoder, layout: Layout, adapter: str | None, cache_dtype: torch.dtype
) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Return the modules of the methods, each with its inputs."""
    # Two tensors, because torch.export merges inputs that are the same object.
    position, last = torch.tensor([0]), torch.tensor([0])
    chunk = decoder.inputs(layout.chunk)
    # Methods share no state, so their buffers need different names.
    suffix = "" if adapter is None else f"_{adapter}"
    if layout.standard:
        options: dict[str, Any] = {"suffix": suffix, "cache_dtype": cache_dtype}
        forward = (
            NeuralEngineForward(decoder, layout, **options)
            if isinstance(decoder, NeuralEngineDecoder)
            else StandardForward(decoder, layout, **options)
        )
        return [(forward, (chunk, position))]
    if layout.cache is CacheKind.STATE:
        forward = Forward(
            decoder, layout.chunk, layout.context, selection=layout.selection, suffix=suffix
        )
        return [(forward, (chunk, position, last))]
    empty = [layer.empty(layout.context, 0, cache_dtype) for layer in decoder.layers]
    caches = [cache for tensors in empty for cache in tensors.values()]
    return [
        (Decode(decoder, layout.selection), (decoder.inputs(1), position, caches)),
        (Prefill(decoder, layout.selection), (chunk, position, last, caches)),
    ]


def lower(
    methods: Mapping[str, ExportedProgram], layout: Layout, partitioner: CoreMLPartitioner
) -> Any:
    """Lower the methods, with the layout as constant methods.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: The partitioner or the backend refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    return lower_methods(
        methods,
        partitioner,
        layout.constants(),
        write_in_place=layout.cache is CacheKind.BUFFER,
    )


def drop_unused_buffers(program: ExportedProgram) -> None:
    """Remove unused buffers, for example rotary tables from ``vision``.

    ExecuTorch removes unused parameters, but writes unused buffers into the file.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        node = nodes.get(spec.arg.name)
        if spec.kind is InputKind.BUFFER and node is not None and not node.users:
            program.graph.erase_node(node)
            specs.remove(spec)
            for tensors in (program.state_dict, program.constants):
                tensors.pop(str(spec.target), None)
    program.graph_module.recompile()


def _drop_unread_numbers(program: ExportedProgram) -> None:
    """Remove assertions and the scalars that only they read.

    Some modules read the number of earlier tokens even if positions are passed, and
    ``torch.export`` asserts that it is not negative.
    """
    targets = [node.target for node in program.graph.nodes]
    if _CHECKS[0] in targets:
        for node in list(program.graph.nodes):
            if node.target in _CHECKS:
                program.graph.erase_node(node)
        program.graph.eliminate_dead_code()


def _quantize(weight: torch.Tensor, dtype: str, group: int) -> torch.Tensor:
    """Quantize a matrix [outputs, inputs] in blocks of rows, to save memory."""
    with quiet_import():
        torchao: Any = importlib.import_module("torchao.quantization")
        granularity: Any = importlib.import_module("torchao.quantization.granularity")
    config = torchao.IntxWeightOnlyConfig(
        weight_dtype=_DTYPES[dtype],
        granularity=granularity.PerGroup(group) if group else granularity.PerAxis(0),
    )
    parts: list[Any] = []
    for rows in in_memory(weight).detach().split(max(1, _CHUNK // weight.shape[1])):
        layer = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(rows, requires_grad=False)
        torchao.quantize_(layer, config)
        parts.append(layer.weight)
    tensors = [
        torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensor_data_names
    ]
    options = [getattr(parts[0], name) for name in parts[0].tensor_attribute_names]
    return type(parts[0].data)(*tensors, *options)


def _replace_weight(modules: Iterable[Any], weight: torch.Tensor) -> None:
    for module in modules:
        module.weight = nn.Parameter(weight, requires_grad=False)


def _check_groups(linears: Mapping[str, nn.Linear], group: int) -> None:
    for name, module in linears.items():
        if module.in_features % group:
            raise OptionError(
                f"groups of weights do not divide {name}",
                got=f"groups of {group} for {module.in_features} inputs",
                remedy="Choose another --group-size",
            )
