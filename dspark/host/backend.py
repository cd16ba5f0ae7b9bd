"""The attention backends SGLang talks to: they turn a batch into a forward's metadata, no more.

The attention itself is in `dspark.target.attention`; the model reads `forward_metadata` from here.
All metadata is computed on the device from `seq_lens`,
`req_pool_indices` and the token tables, so the same code runs eagerly and inside CUDA graphs.
"""

import logging

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from dspark.host.pool_sizes import context_pages
from dspark.host.pools import DSparkKVPool, WindowPool
from dspark.kernels.compress import rows_fit_ring
from dspark.kernels.step import (
    BatchRows,
    BlockRows,
    Bounds,
    Rings,
    Tables,
    draft_meta,
    step_meta,
)
from dspark.target.attention import Forward
from dspark.target.caches import PAGE_TOKENS
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward
from dspark.target.rope import rope_table_on, rope_tables

logger = logging.getLogger(__name__)


def batch_rows(fb, rows_run: torch.Tensor) -> BatchRows:
    """Read the row layout of SGLang's batch (ForwardBatch or its graph-replay stand-in).

    Verify rows fill their width, or are packed: then there are exactly as many as run.

    rows_run: i64 [slots] rows that each request runs in a verify, at most its width.
    """
    mode, slot = fb.forward_mode, fb.req_pool_indices
    # SGLang pads graph batches with request slot 0, which no request ever owns.
    real = (slot > 0).to(torch.int64)
    seq_lens = fb.seq_lens.to(torch.int64)
    if mode.is_target_verify():
        width = fb.spec_info.draft_token_num
        run = real * rows_run[slot].clamp(max=width)
        total = fb.input_ids.shape[0]
        fixed = total == fb.batch_size * width
        return BatchRows(slot, seq_lens, run, total, width if fixed else None)
    if mode.is_extend():
        return BatchRows(
            slot,
            fb.extend_prefix_lens.to(torch.int64),
            fb.extend_seq_lens.to(torch.int64),
            fb.input_ids.shape[0],
        )
    return BatchRows(slot, seq_lens - real, real, fb.batch_size, 1)


class DSparkAttentionBackend(AttentionBackend):
    """The target's: a batch in, a `Forward` out; registered under SGLang's name `dsv4`."""

    # Lengths stay on the device; SGLang may skip its per-step copy to the host.
    needs_cpu_seq_lens = False

    def __init__(self, runner):
        super().__init__()
        self.token_to_kv_pool: DSparkKVPool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.config = ModelConfig.from_hf(runner.model_config.hf_config)
        self.context_pages = context_pages(runner.model_config.context_len)
        self.rope = rope_tables(
            self.config, self.context_pages * PAGE_TOKENS, torch.device(runner.device)
        )
        self.layer_caches = self.token_to_kv_pool.layer_caches
        # By request slot, so that a captured graph reads what the worker wrote for this step.
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self.rows_run = torch.full(
            (slots,), torch.iinfo(torch.int32).max, dtype=torch.int64, device=runner.device
        )
        self.workspace_bytes = runner.model.memory_report.budget.workspace
        self.workspace_reserved = False
        self.forward_metadata: Forward | None = None

    def init_forward_metadata_out_graph(self, fb, in_capture: bool = False) -> None:
        """Head of a graph's replay: what was released is cleared before anything writes.

        With STATE_DEBUG=1 the replay's plan is made a second time, to be observed: the graph makes
        its own, which the host never sees.
        """
        if in_capture:
            return
        state = self.token_to_kv_pool.state
        state.begin_forward()
        if state.tags is not None:
            again = self._forward(fb, self._pages_in_use(fb))
            state.observe(again.meta, fb.req_pool_indices)

    def init_forward_metadata_in_graph(self, fb) -> None:
        self.forward_metadata = self._forward(fb, self.context_pages)

    def init_forward_metadata(self, fb) -> None:
        """Eager entry: tables only as wide as the longest request of this batch."""
        if fb.forward_mode.is_idle():
            return
        mode = fb.forward_mode
        if mode.is_extend() and not mode.is_target_verify() and not self.workspace_reserved:
            self._reserve_workspace()
        state = self.token_to_kv_pool.state
        state.begin_forward()
        self.forward_metadata = self._forward(fb, self._pages_in_use(fb))
        state.observe(self.forward_metadata.meta, fb.req_pool_indices)

    def _reserve_workspace(self) -> None:
        """Have torch keep the bytes of the widest forward, on the stream that forwards run on.

        The first prompt is a warm-up's; from then on nothing of the budget is left to ask for.
        """
        self.workspace_reserved = True
        if self.rows_run.is_cuda:
            torch.cuda.empty_cache()
            try:
                torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.rows_run.device)
            except torch.OutOfMemoryError as error:
                logger.warning("The planned workspace is not free at the start: %s", error)

    def _forward(self, fb, pages: int) -> Forward:
        rows = batch_rows(fb, self.rows_run)
        geometry = self.token_to_kv_pool.state.geometry
        verifies = fb.forward_mode.is_target_verify()
        running = verifies or not fb.forward_mode.is_extend()
        # Sizes that break this are refused at start.
        assert not verifies or rows_fit_ring(fb.spec_info.draft_token_num, geometry.c4.ring)
        meta = step_meta(
            rows,
            Tables(
                self.req_to_token_pool.req_to_token,
                self.token_to_kv_pool.full_to_swa_index_mapping,
            ),
            Bounds(self.config.sliding_window, pages, pages * PAGE_TOKENS // 128, PAGE_TOKENS),
            Rings(geometry.c4.ring, geometry.c128.ring),
            store_all=running,
        )
        return Forward(meta, running, self.rope, self.layer_caches)

    def _pages_in_use(self, fb) -> int:
        """Pages of the longest request, from host lengths where there are any.

        On a GPU without host lengths the static bound is used: reading the device would wait.
        """
        lengths = fb.seq_lens_cpu
        if lengths is None:
            if fb.seq_lens.is_cuda:
                return self.context_pages
            lengths = fb.seq_lens
        margin = fb.spec_info.draft_token_num if fb.forward_mode.is_target_verify() else 0
        longest = max(lengths.tolist(), default=0) + margin
        return max(1, -(-longest // PAGE_TOKENS))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to preallocate: `step_meta` writes into the graph's own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


class DraftAttentionBackend(AttentionBackend):
    """The draft runner's: a batch in, a `DraftForward` out.

    Serves blocks of `gamma` rows a request at positions L..L+gamma-1.

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


def make_backend(runner) -> AttentionBackend:
    """Factory for SGLang's backend registry; the draft runner gets its own metadata."""
    if runner.is_draft_worker:
        return DraftAttentionBackend(runner)
    return DSparkAttentionBackend(runner)
