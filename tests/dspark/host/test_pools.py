"""What the pools of the target say of themselves to SGLang."""

from types import SimpleNamespace

import torch

from dspark.host.pools import GIB, DSparkKVPool
from dspark.kernels.common.index_pages import PACKED_STRIDE
from dspark.kernels.common.kv_pages import page_stride

PAGE = 256


def test_memory_in_use_is_that_of_all_pools():
    """Layers with a window only, compression by 4, by 128; 8 pages and the one of SGLang's."""
    config = SimpleNamespace(num_hidden_layers=3, compress_ratios=[0, 4, 128])
    pool = DSparkKVPool(config, 8 * PAGE, 8 * PAGE, 4, 6, torch.uint8, "cpu")
    page = 3 * page_stride(PAGE) + page_stride(PAGE // 4) + page_stride(PAGE // 128) + PACKED_STRIDE
    rings = [pool.state.pools.layer(kind, 0) for kind in ("c4", "idx", "c128")]
    assert pool.mem_usage * GIB == 9 * page + sum(ring.nbytes for ring in rings)
