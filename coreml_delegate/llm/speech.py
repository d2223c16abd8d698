"""Speech recognizers of transformers (Parakeet), as methods of a ``.pte``.

A recording becomes log-mel features [F, T], an encoder of conformer blocks makes T' = T / 8 frames
of them, and tokens follow from the frames:

- CTC: each frame has logits of a token or blank; equal neighbours are one token.
- RNN-T: a *transducer*. A prediction network (LSTM) makes a vector of the tokens so far, a joint
  network logits of the next token or blank from that vector and the vector of frame t. After a
  blank t grows by 1.
- TDT: as RNN-T, but the joint network also predicts by how many frames t grows after each token.

The methods and constants of transducers are those that ExecuTorch's Parakeet runner calls
(``examples/models/parakeet``). Its loop is the one of TDT, with durations 0 to 4; a joint network
that returns the duration 1 for a blank and 0 for other tokens makes it that of RNN-T.

Source: "Fast Conformer" https://arxiv.org/abs/2305.05084, "TDT" https://arxiv.org/abs/2304.06795,
``transformers.models.parakeet``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import MASKED
from coreml_delegate.llm.checkpoint import load_model, random_model, read_any_config
from coreml_delegate.llm.decoder_methods import keep_sizes_static
from coreml_delegate.llm.speech_features import FeatureSettings, Preprocessor
from coreml_delegate.llm.stored_weights import read_weights
from coreml_delegate.patches.third_party import transformers, wrap_errors

SECONDS = 15
"""Length of the longest recording by default."""

PREPROCESSOR, ENCODER = "preprocessor", "encoder"
DECODER_STEP, JOINT = "decoder_step", "joint"

KIND, SAMPLES, SYMBOLS = "get_recognizer_kind", "get_max_samples", "get_max_symbols_per_step"
"""Names of the constants that ExecuTorch's runner does not have."""

_RUNNER_DURATIONS = (0, 1, 2, 3, 4)
_TOLERANCE = 1e-3  # of the largest value; padding changes the order of sums


class Kind(enum.Enum):
    """How tokens follow from frames; the module has the rules."""

    CTC = "ctc"
    RNNT = "rnnt"
    TDT = "tdt"


_AUTO_CLASSES: Mapping[str, tuple[Kind, str]] = MappingProxyType(
    {
        "parakeet_ctc": (Kind.CTC, "AutoModelForCTC"),
        "parakeet_rnnt": (Kind.RNNT, "AutoModelForRNNT"),
        "parakeet_tdt": (Kind.TDT, "AutoModelForTDT"),
    }
)


class Recognizer(nn.Module):
    """A Parakeet model for recordings of up to T frames.

    Args:
        model: ``ParakeetForTDT``, ``ParakeetForRNNT`` or ``ParakeetForCTC`` in eval mode.
        settings: Of the features.
        seconds: Length of the longest recording.

    Attributes:
        kind: How tokens follow from frames.
        frames: T, the number of mel frames.

    Raises:
        LoweringError: The encoder's result with padding is not the model's own without.
        OptionError: The recording is too long or short for the model; features or durations do not
            fit.
    """

    def __init__(self, model: Any, settings: FeatureSettings, seconds: float = SECONDS) -> None:
        super().__init__()
        config = model.config
        self.kind = _AUTO_CLASSES[config.model_type][0]
        self.model = model
        self.settings = settings
        self.frames = int(seconds * settings.sampling_rate) // settings.hop_length
        self._check_sizes(seconds)
        if self.kind is Kind.TDT:
            _check_durations(config.durations)
        self.eval()
        self.features = Preprocessor(settings, self.frames)
        self.encoder = Encoder(model, self.frames)
        self._check_padding()

    @property
    def blank(self) -> int:
        """Token that stands for no token."""
        config = self.model.config
        return config.pad_token_id if self.kind is Kind.CTC else config.blank_token_id

    @property
    def embedding(self) -> nn.Module | None:
        """The token embedding of the prediction network; None for CTC."""
        return None if self.kind is Kind.CTC else self.model.decoder.embedding

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules whose linear layers are quantized, by name."""
        yield from self.named_modules()

    def constants(self) -> dict[str, Any]:
        """Return the values of constant methods by name: the runner's, then ours."""
        config, settings = self.model.config, self.settings
        values: dict[str, Any] = {
            "vocab_size": config.vocab_size - 1,
            "blank_id": self.blank,
            "sample_rate": settings.sampling_rate,
            "window_stride": settings.hop_length / settings.sampling_rate,
            "encoder_subsampling_factor": config.encoder_config.subsampling_factor,
        }
        if self.kind is not Kind.CTC:
            values |= {
                "num_rnn_layers": config.num_decoder_layers,
                "pred_hidden": config.decoder_hidden_size,
                "joint_hidden": config.decoder_hidden_size,
                SYMBOLS: config.max_symbols_per_step,
            }
        return values | {
            KIND: self.kind.value,
            SAMPLES: self.frames * settings.hop_length,
        }

    def _check_sizes(self, seconds: float) -> None:
        config = self.model.config.encoder_config
        factor = config.subsampling_factor
        most = config.max_position_embeddings
        if not factor <= self.frames <= most:
            rate = self.settings.sampling_rate / self.settings.hop_length
            raise OptionError(
                "the model does not take recordings of this length",
                got=f"{seconds:g} s",
                expected=f"{factor / rate:g} to {most / rate:g} s",
            )
        if config.num_mel_bins != self.settings.bins:
            raise OptionError(
                "the features of the checkpoint's preprocessor do not fit its encoder",
                got=f"{self.settings.bins} bins",
                expected=f"{config.num_mel_bins} bins",
            )

    @torch.no_grad()
    def _check_padding(self) -> None:
        """Compare a recording of half the length with the unchanged model's result."""
        length = max(self.frames // 2, 1)
        random = torch.Generator().manual_seed(0)
        features = torch.randn(1, self.settings.bins, self.frames, generator=random)
        features[..., length:] = 0
        with wrap_errors(f"cannot run {type(self.model).__name__}", kind=LoweringError):
            expected = _encode(self.model, features[..., :length].transpose(1, 2))
            actual, count = self.encoder(features, torch.tensor([length]))
        valid = actual[:, : int(count)]
        bound = _TOLERANCE * float(expected.abs().max())
        if valid.shape != expected.shape or not torch.allclose(valid, expected, rtol=0, atol=bound):
            raise LoweringError(
                f"{type(self.model).__name__} encodes otherwise than this package expects",
                remedy="Report the version of transformers",
            )


def _check_durations(durations: Any) -> None:
    """Refuse durations that ExecuTorch's runner, with its own table, would take for others."""
    if tuple(durations) != _RUNNER_DURATIONS[: len(durations)]:
        raise OptionError(
            "the model predicts durations that are not supported",
            got=str(list(durations)),
            expected=str(list(_RUNNER_DURATIONS)),
        )


def _encode(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Return the result of ``Encoder`` for features [1, T, F] without padding."""
    states = model.encoder(features).last_hidden_state
    return _project(model, states)


def _project(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Return states [1, T', width] as inputs of the joint network, or logits of CTC."""
    projection = getattr(model, "encoder_projector", None) or model.ctc_head
    return projection(states)


class Encoder(nn.Module):
    """Method ``encoder``: features of a recording to frames.

    ExecuTorch's kernels make masks of the number of frames: the neural engine computes neither
    integers nor booleans, and fp16 rounds numbers from 2048 on. Core ML does the rest.

    Args:
        model: The model.
        frames: T.
    """

    def __init__(self, model: Any, frames: int) -> None:
        super().__init__()
        config = model.config.encoder_config
        self._convolution = (config.subsampling_conv_kernel_size, config.subsampling_conv_stride)
        self._sizes = self._counts(frames, model.encoder.subsampling.num_layers)
        self.core_ml = _Conformer(model, self._sizes[-1])

    def forward(
        self, audio_signal: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return frames [1, T', J], or logits [1, T', V] of CTC, and their number [1], int64.

        Args:
            audio_signal: Features [1, F, T], zero after the recording.
            length: Number of frames of the recording, [1], int64.
        """
        counts = self._counts(length, len(self._sizes))
        masks = [
            (torch.arange(size) < count).float()
            for size, count in zip(self._sizes, counts, strict=True)
        ]
        return self.core_ml(audio_signal, masks), counts[-1]

    def _counts(self, count: Any, convolutions: int) -> list[Any]:
        """Return the numbers of frames after each convolution with a stride."""
        kernel, stride = self._convolution
        counts: list[Any] = []
        for _ in range(convolutions):
            count = (count + 2 * ((kernel - 1) // 2) - kernel) // stride + 1
            counts.append(count)
        return counts


class _Conformer(nn.Module):
    """The encoder of a model, of its own parts.

    Args:
        model: The model.
        count: T'.
    """

    def __init__(self, model: Any, count: int) -> None:
        super().__init__()
        self.model = model
        encoder = model.encoder
        with torch.no_grad():
            positions = encoder.encode_positions(torch.empty(1, count, encoder.config.hidden_size))
            for number, layer in enumerate(encoder.layers):
                keys = layer.self_attn.relative_k_proj(positions)
                heads = keys.unflatten(-1, (-1, layer.self_attn.head_dim)).permute(0, 2, 3, 1)
                self.register_buffer(f"keys_{number}", heads.contiguous())

    def forward(self, audio_signal: torch.Tensor, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the frames [1, T', J], or logits.

        Args:
            audio_signal: Features [1, F, T].
            masks: 1 for frames of the recording, 0 for padding, after each convolution with a
                stride: [T_i], the last [T'].
        """
        encoder = self.model.encoder
        states = self._subsample(audio_signal.transpose(1, 2)[:, None], masks)
        states = states * encoder.input_scale
        valid = masks[-1]
        for number, layer in enumerate(encoder.layers):
            states = states + 0.5 * layer.feed_forward1(layer.norm_feed_forward1(states))
            keys = self.get_buffer(f"keys_{number}")
            states = states + _attend(layer.self_attn, layer.norm_self_att(states), keys, valid)
            states = states + _convolve(layer.conv, layer.norm_conv(states), valid)
            states = states + 0.5 * layer.feed_forward2(layer.norm_feed_forward2(states))
            states = layer.norm_out(states)
        return _project(self.model, states)

    def _subsample(self, states: torch.Tensor, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return states [1, T', width] of features [1, 1, T, F]; padding is zero at each step."""
        subsampling = self.model.encoder.subsampling
        strided = -1
        for layer in subsampling.layers:
            states = layer(states)
            if isinstance(layer, nn.Conv2d):
                strided += layer.stride != (1, 1)
                states = states * masks[strided][:, None]
        return subsampling.linear(states.transpose(1, 2).flatten(2))


def _attend(
    attention: Any, states: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Return the attention of states [1, T', width] with relative positions.

    The scores of queries q and keys k of the frames, and keys p of distances, are
    ((q + u) k + (q + v) p) / sqrt(width of a head) (Transformer-XL, appendix B).

    Args:
        attention: ``ParakeetEncoderAttention``.
        states: The states.
        keys: p: [1, heads, width of a head, 2 T' - 1].
        valid: 1 for frames of the recording, [T'].
    """
    sizes = (-1, attention.head_dim)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (p(states).unflatten(-1, sizes).transpose(1, 2) for p in projections)
    by_content = (query + attention.bias_u[:, None]) @ key.transpose(2, 3)
    by_distance = (query + attention.bias_v[:, None]) @ keys
    by_distance = attention._rel_shift(by_distance)[..., : states.shape[1]]
    scores = (by_content + by_distance) * attention.scaling + (1 - valid) * MASKED
    return attention.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def _convolve(convolution: Any, states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the result of a ``ParakeetEncoderConvolutionModule`` for states [1, T', width]."""
    states = functional.glu(convolution.pointwise_conv1(states.transpose(1, 2)), dim=1) * valid
    states = convolution.activation(convolution.norm(convolution.depthwise_conv(states)))
    return convolution.pointwise_conv2(states).transpose(1, 2)


class DecoderStep(nn.Module):
    """Method ``decoder_step``: the prediction network for one token.

    The step of the LSTM is written out, because Core ML's own op leaves the neural engine and
    computes in fp32 here.

    Args:
        model: A transducer.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(
        self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the vector [1, 1, J] for the joint network, and the new states.

        Args:
            token: [1, 1], int64; blank at the start.
            h: Hidden states of the LSTM [layers, 1, J]; zero at the start.
            c: Its cell states [layers, 1, J].
        """
        output = self.decoder.embedding(token)[0]
        hidden: list[torch.Tensor] = []
        cells: list[torch.Tensor] = []
        layers = zip(self.decoder.lstm.all_weights, h.unbind(), c.unbind(), strict=True)
        for (of_input, of_state, bias, bias_of_state), state, cell in layers:
            gates = functional.linear(output, of_input, bias)
            gates = gates + functional.linear(state, of_state, bias_of_state)
            enter, keep, candidate, leave = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            output = leave.sigmoid() * cell.tanh()
            hidden.append(output)
            cells.append(cell)
        return self.decoder.decoder_projector(output)[None], torch.stack(hidden), torch.stack(cells)


class Joint(nn.Module):
    """Method ``joint``: the next token.

    Args:
        model: A transducer.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.joint = model.joint
        self._vocabulary = model.config.vocab_size
        self._blank = model.config.blank_token_id

    def forward(self, f: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token [1], or blank, and by how many frames to move on, [1]; int64.

        Args:
            f: A frame of ``encoder``, [1, 1, J].
            g: Result of ``decoder_step``, [1, 1, J].
        """
        logits = self.joint(decoder_hidden_states=g, encoder_hidden_states=f)[:, 0]
        token = logits[:, : self._vocabulary].argmax(-1)
        if logits.shape[-1] == self._vocabulary:  # RNN-T
            return token, (token == self._blank).long()
        return token, logits[:, self._vocabulary :].argmax(-1)


def load_recognizer(
    folder: Path | None, config_path: Path, *, seconds: float = SECONDS, seed: int = 0
) -> Recognizer:
    """Return a recognizer with the weights of a checkpoint, in fp32, or with random weights.

    Args:
        folder: Checkpoint as transformers saves it; None for random weights.
        config_path: ``config.json``.
        seconds: Length of the longest recording.
        seed: Seed of random weights.

    Raises:
        OptionError: A file is missing or malformed, the architecture is not supported; or see
            ``Recognizer``.
        LoweringError: See ``Recognizer``.
    """
    config = read_any_config(config_path)
    if config.model_type not in _AUTO_CLASSES:
        raise OptionError(
            f"{config_path} has an architecture that is not supported",
            got=f"model_type {config.model_type!r}",
            expected=", ".join(_AUTO_CLASSES),
        )
    model_class = getattr(transformers(), _AUTO_CLASSES[config.model_type][1])
    if folder is None:
        model = random_model(config, seed, model_class)
    else:
        model = load_model(folder, config, model_class)
        read_weights(model)
    settings = FeatureSettings.read(folder, config.encoder_config.num_mel_bins)
    return Recognizer(model, settings, seconds)


def export_recognizer(recognizer: Recognizer) -> dict[str, ExportedProgram]:
    """Export the methods in ATen dialect.

    Raises:
        LoweringError: ``torch.export`` cannot capture the model.
    """
    model, frames = recognizer.model, recognizer.frames
    random = torch.Generator().manual_seed(0)
    samples = 0.1 * torch.randn(frames * recognizer.settings.hop_length, generator=random)
    features = torch.randn(1, recognizer.settings.bins, frames, generator=random)
    methods: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        ENCODER: (recognizer.encoder, (features, torch.tensor([frames])))
    }
    if recognizer.kind is not Kind.CTC:
        config = model.config
        width, layers = config.decoder_hidden_size, config.num_decoder_layers
        # Separate tensors, because torch.export merges inputs that are the same object.
        states = [torch.zeros(layers, 1, width) for _ in range(2)]
        vectors = [torch.randn(1, 1, width, generator=random) for _ in range(2)]
        methods[DECODER_STEP] = (DecoderStep(model), (torch.zeros(1, 1).long(), *states))
        methods[JOINT] = (Joint(model), tuple(vectors))
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        count = Dim("samples", max=len(samples))
        preprocessor = torch.export.export(
            recognizer.features.eval(),
            (samples, torch.tensor([len(samples)])),
            dynamic_shapes=({0: count}, None),
        )
        exported = {
            name: torch.export.export(module.eval(), inputs)
            for name, (module, inputs) in methods.items()
        }
    keep_sizes_static(preprocessor, "the number of samples varies")
    keep_sizes_static(exported[ENCODER], "it computes the masks of padding")
    return {PREPROCESSOR: preprocessor, **exported}
