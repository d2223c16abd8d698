"""Blocks of models whose libraries the project does not install, at their published widths.

They are written from the published architectures: latent diffusion (Rombach et al. 2022), PointNet
(Qi et al. 2017) and DGCNN (Wang et al. 2019), RNN-T (Graves 2012), Whisper's log-mel spectrogram
(Radford et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]
_GROUPS = 32


class Residual(nn.Module):
    """Two convolutions with group norms; the step of the diffusion is added between them."""

    def __init__(self, inputs: int, outputs: int, step: int | None) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(_GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.step = nn.Sequential(nn.SiLU(), nn.Linear(step, outputs)) if step else None
        self.second = nn.Sequential(
            nn.GroupNorm(_GROUPS, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, step: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if self.step is not None:
            hidden = hidden + self.step(step)[:, :, None, None]
        return self.skip(x) + self.second(hidden)


class Attention(nn.Module):
    """Attention of queries to ``context``, or to themselves."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context or width, width, bias=False)
        self.value = nn.Linear(context or width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        parts = (self.query(x), self.key(context), self.value(context))
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A feed-forward layer with a GELU as gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, -1)
        return self.outer(value * functional.gelu(gate))


class CrossAttending(nn.Module):
    """A transformer layer over pixels that attends to a text."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, heads), Attention(width, heads, text)
        self.feed = Gated(width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        tokens = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        tokens = tokens + self.own(self.norms[0](tokens))
        tokens = tokens + self.cross(self.norms[1](tokens), text)
        tokens = tokens + self.feed(self.norms[2](tokens))
        pixels = tokens.transpose(1, 2).unflatten(2, (height, width))
        return x + self.leave(pixels)


class DiffusionBlock(nn.Module):
    """The first down block of the UNet of Stable Diffusion 1, with one layer, and its step."""

    def __init__(self, width: int = 320, heads: int = 8, text: int = 768) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.embed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width)
        )
        self.residual = Residual(width, width, 4 * width)
        self.attend = CrossAttending(width, heads, text)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        half = width // 2
        self.register_buffer("speeds", 10000 ** -(torch.arange(half) / half))

    def forward(self, latent: Tensor, step: Tensor, text: Tensor) -> Tensor:
        angles = step[:, None].float() * self.speeds
        embedded = self.embed(torch.cat((angles.cos(), angles.sin()), -1))
        hidden = self.residual(self.enter(latent), embedded)
        return self.down(self.attend(hidden, text))


def diffusion_block(size: int) -> Built:
    """The block, a latent image of so many pixels, a step and a text of 77 tokens."""
    torch.manual_seed(0)
    inputs = (torch.randn(1, 4, size, size), torch.tensor([500]), torch.randn(1, 77, 768))
    return DiffusionBlock().eval(), inputs


class LatentDecoder(nn.Module):
    """The decoder of Stable Diffusion's autoencoder, with one residual block at each size."""

    def __init__(self, widths: tuple[int, ...] = (512, 256, 128)) -> None:
        super().__init__()
        width = widths[0]
        self.enter = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, width, 3, padding=1))
        self.before, self.after = Residual(width, width, None), Residual(width, width, None)
        self.norm, self.attend = nn.GroupNorm(_GROUPS, width), Attention(width, 1)
        self.up = nn.ModuleList(
            nn.Sequential(
                Residual(a, b, None),
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(b, b, 3, padding=1),
            )
            for a, b in zip((width, *widths), widths, strict=False)
        )
        self.leave = nn.Sequential(
            nn.GroupNorm(_GROUPS, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)
        )

    def forward(self, latent: Tensor) -> Tensor:
        hidden = self.before(self.enter(latent))
        size = hidden.shape[-2:]
        tokens = self.attend(self.norm(hidden).flatten(2).transpose(1, 2))
        hidden = self.after(hidden + tokens.transpose(1, 2).unflatten(2, size))
        for layer in self.up:
            hidden = layer(hidden)
        return self.leave(hidden)


def latent_decoder(size: int) -> Built:
    """The decoder, and a latent image of so many pixels."""
    torch.manual_seed(0)
    return LatentDecoder().eval(), (torch.randn(1, 4, size, size),)


class PointNet(nn.Module):
    """Classes of a set of points: a learned rotation, layers for each point, and their maximum."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 64, 1), nn.ReLU(), nn.Conv1d(64, 1024, 1), nn.ReLU())
        self.angles = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 9))
        self.points = nn.Sequential(
            nn.Conv1d(3, 64, 1),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 128, 1),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Conv1d(128, 1024, 1),
        )
        self.classes = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, points: Tensor) -> Tensor:
        turn = self.angles(self.turn(points).amax(2)).view(-1, 3, 3) + torch.eye(3)
        turned = torch.bmm(points.transpose(1, 2), turn).transpose(1, 2)
        return self.classes(self.points(turned).amax(2)).log_softmax(-1)


class EdgeConvolution(nn.Module):
    """A layer of DGCNN: the maximum over a point's nearest neighbours, found by their features."""

    def __init__(self, inputs: int = 3, outputs: int = 64, neighbours: int = 20) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.layer = nn.Sequential(
            nn.Conv2d(2 * inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.2),
        )

    def forward(self, points: Tensor) -> Tensor:
        squares = (points**2).sum(1)
        products = torch.bmm(points.transpose(1, 2), points)
        distances = squares[:, :, None] + squares[:, None] - 2 * products
        _, nearest = distances.topk(self.neighbours, largest=False)
        batch, channels, count = points.shape
        index = nearest.view(batch, 1, -1).expand(-1, channels, -1)
        others = points.gather(2, index).view(batch, channels, count, self.neighbours)
        own = points[..., None].expand(-1, -1, -1, self.neighbours)
        return self.layer(torch.cat((others - own, own), 1)).amax(-1)


def point_net(points: int) -> Built:
    """PointNet, and so many points."""
    torch.manual_seed(0)
    return PointNet().eval(), (torch.randn(1, 3, points),)


def edge_convolution(points: int) -> Built:
    """A layer that gathers neighbours, and so many points."""
    torch.manual_seed(0)
    return EdgeConvolution().eval(), (torch.randn(1, 3, points),)


class TransducerStep(nn.Module):
    """A step of RNN-T decoding: the prediction network on the last token, and the joiner."""

    def __init__(self, tokens: int = 1024, width: int = 640, encoder: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.predict = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.from_audio, self.from_text = nn.Linear(encoder, width), nn.Linear(width, width)
        self.join = nn.Linear(width, tokens + 1)

    def forward(
        self, audio: Tensor, token: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        predicted, (hidden, cell) = self.predict(self.embed(token), (hidden, cell))
        joined = torch.relu(self.from_audio(audio) + self.from_text(predicted))
        logits = self.join(joined).log_softmax(-1)
        return logits, logits.argmax(-1), hidden, cell


def transducer_step() -> Built:
    """A step, with a frame of audio, a token and the state of two layers."""
    torch.manual_seed(0)
    state = torch.randn(2, 2, 1, 640)
    inputs = (torch.randn(1, 1, 512), torch.tensor([[7]]), state[0], state[1])
    return TransducerStep().eval(), inputs


class LogMel(nn.Module):
    """The input of Whisper: a spectrogram's power in 80 bands, as bounded logarithms."""

    def __init__(self, bands: int = 80) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        centers = torch.linspace(2, 198, bands)[:, None]
        self.register_buffer("bands", (1 - (torch.arange(201) - centers).abs() / 4).clamp(min=0))

    def forward(self, audio: Tensor) -> Tensor:
        spectrum = torch.stft(audio, 400, 160, window=self.window, return_complex=True)
        power = spectrum[..., :-1].abs() ** 2
        logs = (self.bands @ power).clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax() - 8.0)
        return (logs + 4.0) / 4.0


def log_mel(seconds: float) -> Built:
    """The spectrogram, and so many seconds of sound at 16 kHz."""
    torch.manual_seed(0)
    return LogMel().eval(), (0.1 * torch.randn(1, int(16000 * seconds)),)
