"""Inputs of the sparse attention kernels: pools of normal values and sorted slot lists."""

from typing import NamedTuple

import torch

from dspark.bench.tune.op import seeded
from dspark.kernels.attention import SlotList
from dspark.kernels.common.kv_pages import DATA_BYTES, HEAD, NOPE, SCALE_BYTES, page_stride

WINDOW, TOPK, PAGE, C4_PAGE = 128, 512, 256, 64
SLOT_BYTES = DATA_BYTES + SCALE_BYTES


class Shape(NamedTuple):
    rows: int
    heads: int
    window: int
    entries: int
    pages: int  # of each pool


class Inputs(NamedTuple):
    """Arguments of `mla_sparse`; the lists and queries come in copies, the pools do not."""

    q: torch.Tensor  # bf16 [copies, T, H, 512]
    window_pool: torch.Tensor
    window_idx: torch.Tensor  # i32 [copies, T, window]
    window_len: torch.Tensor
    c4_pool: torch.Tensor
    c4_idx: torch.Tensor  # i32 [copies, T, entries]
    c4_len: torch.Tensor
    sink: torch.Tensor
    cos_sin: torch.Tensor
    pos: torch.Tensor

    def arguments(self, copy: int) -> tuple:
        return (
            self.q[copy],
            SlotList(self.window_pool, PAGE, self.window_idx[copy], self.window_len),
            SlotList(self.c4_pool, C4_PAGE, self.c4_idx[copy], self.c4_len),
            self.sink, HEAD**-0.5, self.cos_sin, self.pos,
        )  # fmt: skip

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(*(tensor.to(device) for tensor in self))


def random_pool(pages: int, per_page: int, random: torch.Generator) -> torch.Tensor:
    """u8 [pages, stride]: normal latents, whose scales differ from group to group."""
    device = random.device
    slots = (pages, per_page)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(*slots, width, device=device, generator=random)

    codes = normal(NOPE).mul_(8).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = normal(HEAD - NOPE).bfloat16().view(torch.uint8)
    scales = torch.randint(
        123, 126, (*slots, SCALE_BYTES), dtype=torch.uint8, device=device, generator=random
    )
    pool = torch.zeros(pages, page_stride(per_page), dtype=torch.uint8, device=device)
    data = per_page * DATA_BYTES
    pool[:, :data] = torch.cat((codes, rope), 2).view(pages, data)
    pool[:, data : data + per_page * SCALE_BYTES] = scales.view(pages, -1)
    return pool


def make(shape: Shape, device: torch.device, copies: int, seed: int) -> Inputs:
    random = seeded(device, seed)

    def slots(width: int, per_page: int) -> torch.Tensor:
        size = (copies, shape.rows, width)
        high = shape.pages * per_page
        listed = torch.randint(0, high, size, device=device, generator=random)
        return listed.int().sort(-1).values

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=random)

    def length(width: int) -> torch.Tensor:
        return torch.full((shape.rows,), width, dtype=torch.int32, device=device)

    return Inputs(
        normal(copies, shape.rows, shape.heads, HEAD).bfloat16(),
        random_pool(shape.pages, PAGE, random),
        slots(shape.window, PAGE),
        length(shape.window),
        random_pool(shape.pages, C4_PAGE, random),
        slots(shape.entries, C4_PAGE),
        length(shape.entries),
        normal(shape.heads),
        normal(256, 64),
        torch.randint(0, 256, (shape.rows,), device=device, generator=random),
    )
