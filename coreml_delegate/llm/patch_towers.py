"""Vision towers of the Qwen-VL family for images of one size.

Such a tower takes patches of images of any size, and derives their order, positions and windows
from the sizes, which cannot be exported. Here all of that is constant, and the tower takes pixels.
Its blocks and mergers stay those of ``transformers``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from coreml_delegate.llm.attention import attend
from coreml_delegate.llm.stored_weights import in_memory


def _library() -> Any:
    """Return the functions of ``transformers`` for the order and positions of patches."""
    return importlib.import_module("transformers.vision_utils")


def patches_of(pixels: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the patches [N, 3 * frames * patch * patch] that the unchanged tower takes.

    Patches that the tower merges follow one another, and each frame is the image.

    Args:
        pixels: [1, 3, H, W].
        config: The tower's configuration.
    """
    patch, merged, frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
    rows, columns = (side // (patch * merged) for side in pixels.shape[2:])
    blocks = pixels.view(3, rows, merged, patch, columns, merged, patch)
    ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    return ordered.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(
        rows * columns * merged**2, -1
    )


class PatchTower(nn.Module):
    """The tower for images of one size.

    Args:
        tower: The tower of ``transformers``; modules of it are used.
        size: Height and width of an image, multiples of the size of merged patches.
    """

    def __init__(self, tower: Any, size: tuple[int, int]) -> None:
        super().__init__()
        config, library = tower.config, _library()
        merged, patch = config.spatial_merge_size, config.patch_size
        rows, columns = (side // patch for side in size)
        grid = torch.tensor([[1, rows, columns]])
        coordinates = library.get_vision_position_ids(
            grid, merged
        )  # rows and columns, block by block
        all_patches = (rows * columns,)
        self._lengths: list[Sequence[int]] = [all_patches] * len(tower.blocks)
        blocks = torch.arange(rows * columns // merged**2)
        if hasattr(tower, "fullatt_block_indexes"):
            blocks, ends = library.get_vision_window_index(grid, merged, tower.window_size, patch)
            windows = tuple(b - a for a, b in itertools.pairwise(ends.tolist()))
            self._lengths = [
                all_patches if number in tower.fullatt_block_indexes else windows
                for number in range(len(tower.blocks))
            ]
        order = (blocks[:, None] * merged**2 + torch.arange(merged**2)).flatten()
        cos, sin = tower.rotary_pos_emb(torch.zeros(1), coordinates[order])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer(
            "order", coordinates[order] @ torch.tensor([columns, 1]), persistent=False
        )
        self.register_buffer("reading_order", blocks.argsort(), persistent=False)
        positions = _learnt_positions(tower, grid)
        self.positions = (
            None if positions is None else nn.Parameter(positions[order], requires_grad=False)
        )
        self.patches = _on_one_frame(tower.patch_embed.proj)
        self.blocks, self.merger = tower.blocks, tower.merger
        for block in self.blocks:
            block.attn = WindowAttention(block.attn)
        self._taps: list[int] = list(getattr(tower, "deepstack_visual_indexes", ()))
        self.mergers = getattr(tower, "deepstack_merger_list", nn.ModuleList())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return embeddings, then features of further layers, [1, P, width * (1 + layers)].

        Args:
            pixels: [1, 3, H, W].
        """
        hidden = self.patches(pixels).flatten(2)[0].t()[self.get_buffer("order")]
        if self.positions is not None:
            hidden = hidden + self.positions
        rotation = self.get_buffer("cos"), self.get_buffer("sin")
        features: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            lengths = self._lengths[number]
            hidden = block(hidden, cu_seqlens=lengths, position_embeddings=rotation)
            if number in self._taps:
                features.append(self.mergers[self._taps.index(number)](hidden))
        rows = torch.cat((self.merger(hidden), *features), dim=-1)
        return rows[self.get_buffer("reading_order")][None]


class WindowAttention(nn.Module):
    """Attention of a block of the tower, within windows of patches.

    Args:
        attention: The attention module of the block.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self._heads, self._scaling = attention.num_heads, attention.scaling

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: Sequence[int],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the attended patches [N, width].

        Args:
            hidden_states: [N, width].
            cu_seqlens: Lengths of the windows; the name is the block's.
            position_embeddings: Cosines and sines [N, width of a head].
        """
        count = hidden_states.shape[0]
        stacked = self.qkv(hidden_states).reshape(count, 3, self._heads, -1)
        query, key, value = stacked.unbind(1)
        cos, sin = (rows[:, None] for rows in position_embeddings)
        query, key = (rows * cos + _rotate_half(rows) * sin for rows in (query, key))
        windows = zip(*(_split(rows, cu_seqlens) for rows in (query, key, value)), strict=True)
        attended = [
            attend(self, *window, attention_mask=None, scaling=self._scaling)[0].flatten(0, 1)
            for window in windows
        ]
        rows = attended[0] if len(attended) == 1 else torch.cat(attended)
        return self.proj(rows.reshape(count, -1))


def _split(rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the windows [B, heads, length, width] of rows [N, heads, width].

    Windows of equal lengths are one batch.
    """
    if len(set(lengths)) == 1:
        parts = [rows.reshape(len(lengths), lengths[0], *rows.shape[1:])]
    else:
        parts = [part[None] for part in rows.split(list(lengths))]
    return [part.transpose(1, 2) for part in parts]


def _rotate_half(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@torch.no_grad()
def _on_one_frame(projection: Any) -> nn.Conv2d:
    """Return a convolution over one frame for a convolution over several equal frames."""
    weight = in_memory(projection.weight).sum(dim=2)
    outputs, inputs, height, width = weight.shape
    kernel = height, width
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=kernel, bias=False, device="meta")
    convolution.weight = nn.Parameter(weight, requires_grad=False)
    convolution.bias = projection.bias
    return convolution


@torch.no_grad()
def _learnt_positions(tower: Any, grid: torch.Tensor) -> torch.Tensor | None:
    """Return the position embeddings [N, width] of patches, block by block; None without them."""
    if not hasattr(tower, "pos_embed"):
        return None
    indices, weights = _library().get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
    )
    return (tower.pos_embed(indices) * weights[:, :, None]).sum(1)
