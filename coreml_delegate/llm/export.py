"""Export of a decoder to a ``.pte``: quantized weights, exported methods, lowering.

``decoder_methods.py`` has the methods. With a selection (``candidates.py``) they return tokens in
place of logits. Each adapter has the same methods again, with its name as a suffix, and shares the
decoder's weights.

For a model that reads images, the methods take embeddings in place of tokens. Two more methods
compute them, of an image and of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from coreml_delegate.errors import LoweringError, OptionError, near_matches
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.decoder_methods import (
    Decode,
    Forward,
    Prefill,
    StandardEmbedding,
    StandardForward,
    keep_sizes_static,
)
from coreml_delegate.llm.embedding import TextEncoder
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.experts import LastLayers, routers
from coreml_delegate.llm.layout import TOKEN_EMBEDDING, CacheKind, Layout
from coreml_delegate.llm.low_rank import Adapter, attached
from coreml_delegate.llm.neural_engine import NeuralEngineDecoder, NeuralEngineForward
from coreml_delegate.llm.quantized_checkpoint import is_quantized, kept_quantization
from coreml_delegate.llm.speech import Recognizer
from coreml_delegate.llm.stored_weights import in_memory, read_weights
from coreml_delegate.opaque_ops.recorded_compression import is_record
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.patches.third_party import quiet_import, wrap_errors
from coreml_delegate.quantization import QuantizationAssignment, QuantizationMode
from coreml_delegate.quantization.apply import obstacle
from coreml_delegate.quantization.assignment import applies
from coreml_delegate.quantization.configs import torchao_config

Quantizable: TypeAlias = Decoder | EncoderDecoder | TextEncoder | Recognizer

_ATEN: Any = torch.ops.aten
_CHECKS = (_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default)

_CHUNK = 2**24  # elements quantized at a time
_MOST_EXAMPLES = 3  # in a message


def quantize_weights(
    decoder: Quantizable,
    *,
    linear: QuantizationAssignment | None = None,
    embedding: QuantizationMode | None = None,
) -> None:
    """Quantize weights in place; activations stay in floating point.

    Modules that share the embedding's weight, such as the head, are quantized as the embedding.
    Routers of experts are not quantized. Layers that the checkpoint stores quantized keep its
    integers.

    Args:
        decoder: The model, which is changed.
        linear: Modes of the linear layers by module path in the checkpoint; None leaves them in
            float.
        embedding: Mode of the embedding; None leaves it in float.

    Raises:
        OptionError: A mode is applied after conversion, or needs an exported program; it does not
            divide a layer; or a path of the assignment has no linear layer.
    """
    vocabulary = _vocabulary(decoder)
    linears = linear_layers(decoder)
    modes = {} if linear is None else _modes_by_layer(linears, linear)
    modules: list[Any] = [*linears.values(), *vocabulary]
    stored = [module for module in modules if is_quantized(module.weight)]
    layers = [(name, linears[name], mode) for name, mode in modes.items()]
    if embedding is not None:
        if not vocabulary:
            raise OptionError("the model has no embedding", got=f"mode {embedding.name}")
        layers.append(("the embedding", decoder.embedding, embedding))
    layers = [row for row in layers if row[1] not in stored]
    _check_division(layers)
    for _, layer, mode in layers:
        if layer is decoder.embedding:
            _replace_weight(vocabulary, _quantize(layer.weight, mode))
        else:
            _replace_weight([layer], quantized_weight(layer, mode))
    for module in stored:
        integers = kept_quantization(module.weight)
        if integers is not None:  # not replaced with the weight of another module
            sharing = [other for other in stored if other.weight is module.weight]
            _replace_weight(sharing, integers.tensor())


def quantized_weight(layer: Any, mode: QuantizationMode) -> Any:
    """Return the weight of a linear layer as a quantized tensor of torchao.

    A scale for a whole row of experts is a scale for the row of each expert.
    """
    if isinstance(layer, LastLayers) and mode.group_size is None and not mode.codebook:
        mode = replace(mode, group_size=layer.inputs)
    return _quantize(layer.weight, mode)


def linear_layers(decoder: Quantizable) -> dict[str, Any]:
    """Return the linear layers that ``quantize_weights`` quantizes, by path in the checkpoint."""
    excluded = {*_vocabulary(decoder), *routers(decoder)}
    return {
        name.removeprefix("model."): module
        for name, module in decoder.language_modules()
        if isinstance(module, nn.Linear) and module not in excluded
    }


def _vocabulary(decoder: Quantizable) -> list[nn.Module]:
    """Return the embedding and the modules that share its weight."""
    table = getattr(decoder.embedding, "weight", None)
    if table is None:
        return []
    return [m for m in decoder.modules() if getattr(m, "weight", None) is table]


def _modes_by_layer(
    layers: Mapping[str, nn.Module], assignment: QuantizationAssignment
) -> dict[str, QuantizationMode]:
    """Return the modes of quantized layers by path."""
    for path in assignment.modules:
        if not any(applies(path, name) for name in layers):
            raise OptionError(
                "the quantization config has a path without a linear layer",
                got=repr(path),
                expected=near_matches(path, layers, f"paths such as {next(iter(layers), None)!r}"),
                remedy="--embedding-quantize is for embeddings, and for a head tied to them",
            )
    modes = {name: assignment.mode_for(name) for name in layers}
    return {name: mode for name, mode in modes.items() if mode is not None}


def _check_division(layers: Iterable[tuple[str, Any, QuantizationMode]]) -> None:
    """Check that groups divide the weights of all layers, given with their paths and modes."""
    reasons = {name: reason for name, layer, mode in layers if (reason := obstacle(layer, mode))}
    if reasons:
        listed = [f"{name}: {reason}" for name, reason in reasons.items()]
        more = [f"and {len(listed) - _MOST_EXAMPLES} more"] if len(listed) > _MOST_EXAMPLES else []
        raise OptionError(
            "groups of weights do not divide every layer",
            got="; ".join([*listed[:_MOST_EXAMPLES], *more]),
            remedy="Choose another number, or another mode for these layers by --quantize-config",
        )


def export_methods(
    decoder: Decoder,
    layout: Layout,
    adapters: Sequence[Adapter] = (),
    *,
    cache_dtype: torch.dtype = torch.float32,
    all_logits: bool = False,
) -> dict[str, ExportedProgram]:
    """Export the methods in ATen dialect; they share the decoder's weights.

    Args:
        decoder: In eval mode; its weights are read into memory.
        layout: Kind of the caches, chunk and context, and names of the adapters.
        adapters: The adapters, in the order of their names.
        cache_dtype: Of caches that are not Core ML states, whose dtype is Core ML's.
        all_logits: Whether a call returns the logits of all its tokens, not of the last only.

    Raises:
        OptionError: ``layout.replaced`` differs from ``decoder.replaced``; a chunk is too short for
            an image; or the layout or the form of the model returns the logits of one token only.
        OptionError: The layout selects more tokens than the vocabulary has.
        LoweringError: ``torch.export`` cannot capture the model.
    """
    _check_layout(decoder, layout, all_logits=all_logits)
    read_weights(decoder)
    exported: dict[str, ExportedProgram] = {}
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        input_modules = decoder.input_modules(layout.chunk)
        for method, (module, example) in zip(layout.input_methods, input_modules, strict=True):
            if method == TOKEN_EMBEDDING:
                module = StandardEmbedding(module, layout.chunk)
            exported[method] = _export(module, (example,), layout)
        for adapter in (None, *adapters):
            name = None if adapter is None else adapter.name
            modules = _method_modules(decoder, layout, name, cache_dtype, all_logits=all_logits)
            with attached(decoder, adapter):
                for method, (module, inputs) in zip(layout.methods_of(name), modules, strict=True):
                    exported[method] = _export(module, inputs, layout)
    for program in exported.values():
        _drop_unread_numbers(program)
        if layout.image is not None:
            drop_unused_buffers(program)
    return exported


def _check_layout(decoder: Decoder, layout: Layout, *, all_logits: bool) -> None:
    """Check that a layout is for this decoder; see ``export_methods``."""
    if layout.selection is not None:
        layout.selection.check(layout.vocabulary)
    if all_logits and (not layout.standard or isinstance(decoder, NeuralEngineDecoder)):
        raise OptionError(
            "only the layout standard, without the form for the neural engine, returns the logits "
            "of every token",
            got=f"the layout {layout.name} of {type(decoder).__name__}",
        )
    replaced = decoder.replaced if layout.cache is CacheKind.IO else ()
    if layout.replaced != replaced:
        raise OptionError(
            "the layout is not the decoder's",
            got=f"replaced caches {layout.replaced}",
            expected=str(replaced),
        )
    if layout.chunk < decoder.least_chunk:
        raise OptionError(
            "an image whose positions see each other has to be in one call",
            got=f"chunks of {layout.chunk} tokens",
            expected=f"at least {decoder.least_chunk}",
            remedy=f"Export with --prefill-chunk {decoder.least_chunk}",
        )


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
    decoder: Decoder,
    layout: Layout,
    adapter: str | None,
    cache_dtype: torch.dtype,
    *,
    all_logits: bool,
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
            else StandardForward(decoder, layout, all_logits=all_logits, **options)
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

    ExecuTorch removes unused parameters, but writes unused buffers into the file. Records of the
    compression of weights stay, for the partitioner, which removes them.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        node = nodes.get(spec.arg.name)
        if spec.kind is not InputKind.BUFFER or is_record(str(spec.target)):
            continue
        if node is not None and not node.users:
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


def _quantize(weight: torch.Tensor, mode: QuantizationMode) -> torch.Tensor:
    """Quantize a matrix [outputs, inputs]; rows with scales in blocks, to save memory."""
    with quiet_import():
        from torchao.quantization import quantize_
    config = torchao_config(mode)
    parts: list[Any] = []
    size = weight.shape[0] if mode.codebook else max(1, _CHUNK // weight.shape[1])
    for rows in in_memory(weight).detach().split(size):
        layer = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(rows, requires_grad=False)
        quantize_(layer, config)
        parts.append(layer.weight)
    if len(parts) == 1:
        return parts[0]
    tensors = [
        torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensor_data_names
    ]
    options = [getattr(parts[0], name) for name in parts[0].tensor_attribute_names]
    return type(parts[0].data)(*tensors, *options)


def _replace_weight(modules: Iterable[Any], weight: torch.Tensor) -> None:
    for module in modules:
        module.weight = nn.Parameter(weight, requires_grad=False)
