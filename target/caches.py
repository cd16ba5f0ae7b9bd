"""The memory one attention layer reads and writes during a forward."""

from typing import NamedTuple

import torch

PAGE_TOKENS = 256  # tokens a page holds in the full and the window pool; SGLang fixes it for V4
C4_PER_PAGE = PAGE_TOKENS // 4
C128_PER_PAGE = PAGE_TOKENS // 128


class LayerCaches(NamedTuple):
    """Pools and compress rings of one layer (formats: `dspark.kernels.common.kv_pages`).

    A window-only layer has nothing but `window`; a C4 layer has all five; a C128 layer has no
    indexer, so `index` and `index_state` are None.
    """

    window: torch.Tensor  # [pages, stride] u8, PAGE_TOKENS slots a page
    compressed: torch.Tensor | None = None  # [pages, stride] u8, C4_PER_PAGE or C128_PER_PAGE slots
    # [pages, 64*132] u8, C4 layers only; hides tuple.index, which nobody needs here
    index: torch.Tensor | None = None  # type: ignore[assignment]
    state: torch.Tensor | None = None  # [rows, 2048 | 1024] f32 ring of raw (kv, score) rows
    index_state: torch.Tensor | None = None  # [rows, 512] f32, C4 layers only
