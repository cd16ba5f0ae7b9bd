"""One request through the real planner, compressors and rings, on one C4 and one C128 layer."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.common.kv_pages import store_slots
from dspark.kernels.compress import CompressRows, Stream, c4_compress_pair, c128_compress
from dspark.kernels.step import BatchRows, Bounds, Rings, StepMeta, Tables, step_meta

PAGE = 256
POSITIONS = 768


class Memory(NamedTuple):
    """Pools of the two layers and the tables that lead to them."""

    window: Tensor  # u8 [pages, stride]
    c4: Tensor  # u8 [pages, stride]
    keys: Tensor  # u8 [pages, 64 * 132] of the indexer
    c128: Tensor  # u8 [pages, stride]
    c4_ring: Tensor  # f32 [rows, 2048]
    keys_ring: Tensor  # f32 [rows, 512]
    c128_ring: Tensor  # f32 [rows, 1024]
    ring_c4: int
    ring_c128: int
    window_table: Tensor  # i64 [full slots]


class Rows(NamedTuple):
    """Raw rows of every position, and of a wrong draft at every position."""

    c4: Tensor  # f32 [POSITIONS, 2048]
    keys: Tensor  # f32 [POSITIONS, 512]
    c128: Tensor  # f32 [POSITIONS, 1024]
    latent: Tensor  # f32 [POSITIONS, 512]

    def at(self, start: int, length: int) -> "Rows":
        return Rows(*(rows[start : start + length] for rows in self))

    def joined(self, other: "Rows") -> "Rows":
        return Rows(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


def random_rows(seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        *(torch.randn(POSITIONS, width, generator=generator) for width in (2048, 512, 1024, 512))
    )


class Weights(NamedTuple):
    ape4: Tensor
    ape4_keys: Tensor
    ape128: Tensor
    norm: Tensor
    norm_keys: Tensor
    cos_sin: Tensor


def weights() -> Weights:
    generator = torch.Generator().manual_seed(99)
    angle = torch.outer(torch.arange(POSITIONS).float(), 0.7 ** torch.arange(32).float())
    return Weights(
        ape4=torch.randn(8, 512, generator=generator),
        ape4_keys=torch.randn(8, 128, generator=generator),
        ape128=torch.randn(128, 512, generator=generator),
        norm=torch.rand(512, generator=generator) + 0.5,
        norm_keys=torch.rand(128, generator=generator) + 0.5,
        cos_sin=torch.cat([angle.cos(), angle.sin()], 1),
    )


def forward(
    memory: Memory, w: Weights, slot: int, pages: list[int], start: int, rows: Rows, store_all: bool
) -> StepMeta:
    """Positions start.. of the request in `slot`, whose full pages are `pages`."""
    length = len(rows.c4)
    token_table = torch.zeros(slot + 1, POSITIONS, dtype=torch.int32)
    for k, page in enumerate(pages):
        token_table[slot, k * PAGE : (k + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
    meta = step_meta(
        BatchRows(torch.tensor([slot]), torch.tensor([start]), torch.tensor([length]), length),
        Tables(token_table, memory.window_table),
        Bounds(128, POSITIONS // PAGE, POSITIONS // 128),
        Rings(memory.ring_c4, memory.ring_c128),
        store_all=store_all,
    )
    store_slots(memory.window, PAGE, meta.window_slot, rows.latent)
    c4_rows = CompressRows(meta.c4_plan, meta.c4_store, meta.c4_entry)
    c128_rows = CompressRows(meta.c128_plan, meta.c128_store, meta.c128_entry)
    latents = Stream(rows.c4, w.ape4, memory.c4_ring, w.norm, memory.c4)
    keys = Stream(rows.keys, w.ape4_keys, memory.keys_ring, w.norm_keys, memory.keys)
    c4_compress_pair(latents, keys, c4_rows, w.cos_sin, running=False)
    c128 = Stream(rows.c128, w.ape128, memory.c128_ring, w.norm, memory.c128)
    c128_compress(c128, c128_rows, w.cos_sin)
    return meta


def entries(memory: Memory, pages: list[int], length: int) -> dict[str, Tensor]:
    """Bytes of the closed entries of positions below `length`, in position order."""
    found = {}
    for kind, pool, ratio in (
        ("c4", memory.c4, 4),
        ("keys", memory.keys, 4),
        ("c128", memory.c128, 128),
    ):
        data = 128 if kind == "keys" else 576
        per_page = PAGE // ratio
        slot = [
            pool[pages[k // per_page], k % per_page * data :][:data] for k in range(length // ratio)
        ]
        scales = [pool[pages[k], per_page * data :] for k in range(length // PAGE)]
        found[kind] = torch.stack(slot) if slot else torch.empty(0)
        found[f"{kind} scales of full pages"] = torch.stack(scales) if scales else torch.empty(0)
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
