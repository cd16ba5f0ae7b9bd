"""Bytes of the KV and state pools, from the configuration alone.

The full pool holds what a request keeps for life: compressed entries (1/4 and 1/128 of a token
a layer) and indexer keys. The window pool holds the latents of the last 128 tokens and the C4
rings, and its pages return as the window slides. C128 rings belong to request slots.
"""

from typing import NamedTuple

from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import page_stride
from dspark.state import StateGeometry
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS
from dspark.target.config import ModelConfig

WINDOW_PAGES_PER_SLOT = 4  # the window, pages across its two ends, slots a verify reserves ahead


class PoolBytes(NamedTuple):
    full_page: int  # entries and indexer keys of 256 tokens, all layers
    window_page: int  # latents and C4 rows of 256 tokens, all layers and draft stages
    slot: int  # C128 rings of one request


def layers_of(config: ModelConfig, ratio: int) -> list[int]:
    """Layer indices of one kind, ascending: their order in the state rings."""
    return [i for i, r in enumerate(config.compress_ratios) if r == ratio]


def context_pages(context: int) -> int:
    """Pages of the longest request and of the rows that a step writes past its end."""
    return -(-context // PAGE_TOKENS) + 1


def state_geometry(
    config: ModelConfig, slots: int, window_pages: int, verify_width: int
) -> StateGeometry:
    """Rings for `slots` requests and `window_pages` pages; `verify_width` is 1 without drafts."""
    return StateGeometry.for_model(
        slots=slots,
        window_pages=window_pages,
        verify_width=verify_width,
        c4_layers=len(layers_of(config, 4)),
        c128_layers=len(layers_of(config, 128)),
    )


def pool_bytes(config: ModelConfig, stages: int, verify_width: int) -> PoolBytes:
    """Bytes of one more page or slot; `stages` draft stages keep window latents too."""
    c4, c128 = len(layers_of(config, 4)), len(layers_of(config, 128))
    one = state_geometry(config, 1, 1, verify_width).nbytes()  # two owners: padding and one more
    return PoolBytes(
        full_page=c4 * (page_stride(C4_PER_PAGE) + PACKED_STRIDE)
        + c128 * page_stride(C128_PER_PAGE),
        window_page=(config.num_hidden_layers + stages) * page_stride(PAGE_TOKENS)
        + (one["c4"] + one["idx"]) // 2,
        slot=one["c128"] // 2,
    )


def window_pages(full_pages: int, requests: int, prompt_rows: int, ratio: float) -> int:
    """Pages of the window pool: what the running requests and one prompt batch need.

    `ratio` of the full pool where that is more (a larger window pool keeps more prefixes
    reusable); never more than the full pool.
    """
    needed = WINDOW_PAGES_PER_SLOT * requests + prompt_rows // PAGE_TOKENS + 1
    return min(full_pages, max(needed, int(full_pages * ratio)))
