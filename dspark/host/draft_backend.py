"""The attention backend of the draft runner: a batch in, a `DraftForward` out."""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from dspark.host.pool_sizes import context_pages
from dspark.host.pools import WindowPool
from dspark.kernels.step import BlockRows, Tables, draft_meta
from dspark.target.caches import PAGE_TOKENS
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward
from dspark.target.rope import rope_table_on


class DraftAttentionBackend(AttentionBackend):
    """Serves blocks of `gamma` rows a request at positions L..L+gamma-1.

    A cached prefix needs no marker: draft latents live in the same window slots as the target's,
    so a page that the prefix cache hands over brings both.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner):
        super().__init__()
        self.token_to_kv_pool: WindowPool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.config = ModelConfig.from_hf(runner.model_config.hf_config)
        assert self.config.dspark is not None
        self.gamma = self.config.dspark.block_size
        positions = context_pages(runner.model_config.context_len) * PAGE_TOKENS
        # The very table of the target's window-only layers.
        self.rope = rope_table_on(
            torch.device(runner.device), self.config.rope_theta, positions, None
        )
        self.layer_caches = self.token_to_kv_pool.layer_caches
        self.forward_metadata: DraftForward | None = None

    def init_forward_metadata_in_graph(self, fb) -> None:
        slot = fb.req_pool_indices
        # SGLang pads graph batches with request slot 0, which no request ever owns.
        meta = draft_meta(
            BlockRows(
                torch.where(slot > 0, slot, -1),
                fb.seq_lens.to(torch.int64),
                torch.zeros_like(slot, dtype=torch.int64),
                self.gamma,
            ),
            Tables(
                self.req_to_token_pool.req_to_token, self.token_to_kv_pool.full_to_swa_index_mapping
            ),
            window=self.config.sliding_window,
        )
        self.forward_metadata = DraftForward(meta, self.rope, self.layer_caches)

    def init_forward_metadata(self, fb) -> None:
        if not fb.forward_mode.is_idle():
            self.init_forward_metadata_in_graph(fb)

    def init_forward_metadata_out_graph(self, fb, in_capture: bool = False) -> None:
        """Nothing happens on the host."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to preallocate: `draft_meta` writes into the graph's own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
