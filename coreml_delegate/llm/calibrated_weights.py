"""Linear layers of a decoder in 4 bits, chosen with a calibration text.

``gptq-4``
    Integers with a scale per group of inputs. Each layer is rounded column by column, and what a
    column loses is added to the columns that follow, so that the outputs of the layer on the text
    change least (Frantar et al., "GPTQ", arXiv:2210.17323).
``skm-4``
    Indices into a table of 16 values for a group of outputs, by k-means in which each weight counts
    as much as its squared gradient (Kim et al., "SqueezeLLM", arXiv:2306.07629).

Both are coremltools' own. They leave floats in the weights and record the compression in buffers,
as which the partitioner stores the weights; see ``opaque_ops.recorded_compression``.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.errors import InputError, LoweringError, OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.experts import LastLayers
from coreml_delegate.llm.export import linear_layers
from coreml_delegate.llm.stored_weights import read_weights
from coreml_delegate.patches.third_party import coremltools, quiet_import

SAMPLES = 128
"""Most pieces of the calibration text that are used."""

_LENGTH = 256  # tokens of a piece, unless the context is shorter
_SHORTEST = 16  # tokens of a text

_BLOCK = re.compile(r"(.*?\.\d+)\.")
"""The block of a layer, by the path of the layer."""


def calibrate_weights(decoder: Decoder, mode: str, tokens: Sequence[int], *, group: int) -> None:
    """Compress the linear layers in place; activations stay in floating point.

    The embedding, and a head tied to it, stay in float.

    Args:
        decoder: The model, which is changed; its weights are read into memory.
        mode: ``gptq-4`` or ``skm-4``.
        tokens: A text. At most ``SAMPLES`` pieces of it are used, spread evenly.
        group: Number of inputs that share a scale, or of outputs that share a table; divides those
            of every layer.

    Raises:
        OptionError: The mode is unknown, ``group`` does not divide a layer, the model lacks a
            token, or it has experts, of which the text may not reach all.
        InputError: The text is too short.
        LoweringError: The layers do not compute with the text.
    """
    if mode not in METHODS:
        raise OptionError("unknown mode", got=repr(mode), expected=" or ".join(METHODS))
    layers = linear_layers(decoder)
    if any(isinstance(layer, LastLayers) for layer in layers.values()):
        raise OptionError(f"{mode} does not calibrate experts", remedy="Choose --quantize int4")
    compress, size_of = METHODS[mode]
    for name, layer in layers.items():
        if size_of(layer) % group:
            raise OptionError(
                f"groups of {mode} do not divide {name}",
                got=f"groups of {group} for {size_of(layer)}",
                remedy="Choose another --group-size",
            )
    if tokens and max(tokens) >= decoder.vocabulary:
        raise OptionError(
            "the tokenizer is not the model's",
            got=f"token {max(tokens)}",
            expected=f"less than {decoder.vocabulary}",
        )
    read_weights(decoder)
    pieces = _pieces(tokens, min(_LENGTH, decoder.context))
    _require_calls(decoder, layers, pieces[0])
    with _quiet():
        compress(decoder, layers, pieces, group)


def _pieces(tokens: Sequence[int], length: int) -> list[torch.Tensor]:
    """Return pieces [1, L] of a text, int64."""
    if len(tokens) < min(_SHORTEST, length):
        raise InputError(
            "the calibration text is too short",
            got=f"{len(tokens)} tokens",
            expected=f"{min(_SHORTEST, length)} or more, better {SAMPLES * length:,}",
        )
    text = torch.tensor(tokens)
    count = min(SAMPLES, max(1, len(tokens) // length))
    starts = torch.linspace(0, max(0, len(tokens) - length), count).long().tolist()
    return [text[start : start + length][None] for start in starts]


@torch.no_grad()
def _require_calls(decoder: Decoder, layers: Mapping[str, Any], piece: torch.Tensor) -> None:
    """Check that a text reaches every layer."""
    reached: set[nn.Module] = set()
    with _hooks(layers.values(), lambda layer, *_: reached.add(layer)):
        decoder(piece)
    missing = [name for name, layer in layers.items() if layer not in reached]
    if missing:
        raise LoweringError(
            "a text does not reach every linear layer, which calibration needs",
            got=", ".join(missing[:3]),
            remedy="Choose --quantize int4",
        )


@contextmanager
def _hooks(layers: Iterable[nn.Module], hook: Callable[..., Any]) -> Generator[None]:
    """Call a function with layer, inputs and result at each call of a layer."""
    handles = [layer.register_forward_hook(lambda *call: hook(*call) and None) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet() -> Generator[None]:
    """Import coremltools' compressors without warnings, and hide their progress bars."""
    coremltools()
    with quiet_import():
        importlib.import_module("coremltools.optimize.torch")  # it sets the level of its logger
        logger = logging.getLogger("coremltools.optimize.torch")
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            # The progress bar of k-means has no option.
            with redirect_stderr(io.StringIO()):
                yield
        finally:
            logger.setLevel(level)


# Methods


@torch.no_grad()
def _gptq(
    decoder: Decoder, layers: Mapping[str, Any], pieces: Sequence[torch.Tensor], group: int
) -> None:
    """Compress the blocks in order: each reads the results of the compressed blocks before it."""
    algorithms: Any = importlib.import_module(
        "coremltools.optimize.torch.layerwise_compression.algorithms"
    )
    config = algorithms.ModuleGPTQConfig.from_dict(
        {
            "weight_dtype": "uint4",
            "granularity": "per_block",
            "block_size": group,
            "use_activation_order_heuristic": True,
        }
    )
    blocks: dict[str, list[str]] = {}
    for name in layers:
        match = _BLOCK.match(name)
        blocks.setdefault(name if match is None else match[1], []).append(name)
    for names in blocks.values():
        solvers = {layers[name]: algorithms.GPTQ(layers[name], config) for name in names}

        def add(layer: nn.Module, inputs: Any, result: Any, solvers: Any = solvers) -> None:
            solvers[layer].add_batch(inputs[0], result)

        with _hooks(solvers, add):
            for piece in pieces:
                decoder(piece)
        for name, solver in zip(names, solvers.values(), strict=True):
            try:
                solver.compress()
            except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage] - documented
                raise LoweringError(f"{name} cannot be calibrated", got=str(error)) from error
            solver.cleanup()


@torch.enable_grad()
def _sensitive_k_means(
    decoder: Decoder, layers: Mapping[str, Any], pieces: Sequence[torch.Tensor], group: int
) -> None:
    palettization: Any = importlib.import_module("coremltools.optimize.torch.palettization")
    options = {"n_bits": 4, "granularity": "per_grouped_channel", "group_size": group}
    config = palettization.SKMPalettizerConfig.from_dict(
        {"global_config": options, "calibration_nsamples": len(pieces)}
    )
    weights = [layer.weight for layer in layers.values()]
    for weight in weights:
        weight.requires_grad_(True)
    # coremltools copies the module, which a decoder does not allow.
    palettizer = palettization.SKMPalettizer(nn.ModuleList(layers.values()), config)
    palettizer.compress(pieces, loss_fn=lambda _, piece: _loss(decoder, piece), inplace=True)
    for layer in layers.values():
        layer.weight.grad = None
        layer.weight.requires_grad_(False)


def _loss(decoder: Decoder, piece: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log p over the tokens of a piece but the first."""
    logits = decoder(piece)[0, :-1]
    return functional.cross_entropy(logits, piece[0, 1:])


METHODS: Mapping[str, tuple[Callable[..., None], Callable[[Any], int]]] = MappingProxyType(
    {
        "gptq-4": (_gptq, lambda layer: layer.in_features),
        "skm-4": (_sensitive_k_means, lambda layer: layer.out_features),
    }
)
"""Compression by mode, and the number that a group divides."""
