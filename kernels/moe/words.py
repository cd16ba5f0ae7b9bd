"""How MXFP4 weights lie in memory for the GPU: words of eight codes that decode without shuffles.

A checkpoint stores 32 columns of a row, one scale group, as 16 bytes, the even column in the low
nibble. A word here holds eight of these columns, two next to each other from each quarter of the
group: word i of a group has columns 8q + 2i and 8q + 2i + 1 of every quarter q. The mma wants its
operand as pairs of neighbouring columns, so one register of the GPU gets both from one word, and
the four words of a group are what the four threads of a quad hold.

Words and scales lie in tiles of 16 rows by 256 (or 128) columns.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dspark.kernels.moe.reference import SCALE_GROUP
from dspark.kernels.moe.types import ExpertWeights

TILE_ROWS = 16  # of weights, as an mma takes them
WORDS_OF_GROUP = 4
PASS_BYTES = 4 << 20  # of packed weights rearranged at once
LARGEST_SCALE = 128  # E8M0 byte of 2.0
SCALE_OFFSET = 126  # the decoded codes are 2^126 too small, and 2^126 * 2 is the largest bf16 power

# Where each quarter's bits (m, e0, e1 of the magnitude, then the sign) lie in the half word of an
# even column. `products._decoded` rotates right by 0, 3 and 6: two signs wrap to the other half.
PLACES = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))


def streamed(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor
) -> ExpertWeights:
    """The checkpoint's four u8 tensors (see `prepare_experts`) as the GPU reads them.

    w13 [E, 2I, Hd/2] with its gates and ups in turn by eight rows, w2 [E, Hd, I/2], both in tiles.
    """
    scales13 = tiled(stream_scales(gates_and_ups_in_turn(s13)), 1)
    scales2 = tiled(stream_scales(s2), 1)
    words13 = tiled_words(w13, gates_and_ups_in_turn)
    return ExpertWeights(words13, scales13, tiled_words(w2), scales2, None, None)


def tiled_words(
    packed: torch.Tensor, arrange: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
) -> torch.Tensor:
    """u8 [E, N, K/2] -> words i32 in tiles, after `arrange` has ordered the rows of each expert.

    A few experts at a time, because their codes pass through 32 bits: beside the input only the
    result is ever whole.
    """
    count, rows, half = packed.shape
    block = block_columns(2 * half)
    shape = (count, rows // TILE_ROWS, -(-2 * half // block), TILE_ROWS, block // 8)
    result = torch.empty(shape, dtype=torch.int32, device=packed.device)
    per_pass = max(1, PASS_BYTES // packed[0].numel())
    for part, to in zip(packed.split(per_pass), result.split(per_pass), strict=True):
        to.copy_(tiled(stream_words(arrange(part)), WORDS_OF_GROUP))
    return result


def block_columns(columns: int) -> int:
    """Columns of a tile; the last tile of a row is filled with zeros."""
    return 256 if columns % 256 == 0 else 128


def gates_and_ups_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ...], gates first -> eight gates, eight ups, and so on: half a tile of each."""
    return rows.unflatten(1, (2, -1, TILE_ROWS // 2)).transpose(1, 2).flatten(1, 3)


def tiled(rows: torch.Tensor, per_group: int) -> torch.Tensor:
    """[..., N, groups * per_group] -> [..., N/16, blocks, 16, per block]: tiles one after another.

    A program streams whole tiles, so what it reads lies together in memory.
    """
    groups = rows.shape[-1] // per_group
    block = block_columns(groups * SCALE_GROUP) // SCALE_GROUP
    rows = F.pad(rows, (0, -groups % block * per_group))
    tiles = rows.unflatten(-1, (-1, block * per_group)).unflatten(-3, (-1, TILE_ROWS))
    return tiles.transpose(-3, -2).contiguous()


def stream_words(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 pairs u8 [..., K/2] of a checkpoint -> words i32 [..., K/8]; K a multiple of 32."""
    groups = packed.unflatten(-1, (-1, SCALE_GROUP // 2)).to(torch.int32)
    codes = torch.stack((groups & 15, groups >> 4), -1).flatten(-2)
    codes = codes.unflatten(-1, (4, 4, 2))  # quarter, word, half
    words = torch.zeros_like(codes[..., 0, :, 0])
    for quarter, places in enumerate(PLACES):
        for half in range(2):
            code = codes[..., quarter, :, half]
            for bit, place in enumerate(places):
                words |= (code >> bit & 1) << (place + 16 * half) % 32
    return words.flatten(-2)


def stream_scales(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 u8 up to LARGEST_SCALE -> biased exponent u8 of the bf16 factor 2^126 * scale.

    0 stays 0, as `decode_e8m0` has it.
    """
    return torch.where(scales == 0, scales, scales + SCALE_OFFSET)
