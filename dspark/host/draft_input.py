"""What SGLang carries from one DSpark step to the next, and the slots it reserves for the next.

SGLang 0.5.17 neither frees window pages nor counts decode steps for this family of drafts, so a
long request would exhaust the window pool; `prepare_for_decode` does both.
"""

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def reserved_length(committed: int, allocated: int, ahead: int, page: int, limit: int) -> int:
    """Positions a request must own before the next step is launched.

    Args:
        committed: tokens the host knows of; the step in flight may have added to them.
        allocated: positions the request owns already.
        ahead: rows the step in flight and the next one may touch beyond `committed`.
        page: allocators hand out whole pages, so whole pages are what is recorded.
        limit: width of the token table.
    """
    return max(allocated, min(-(-(committed + ahead) // page) * page, limit))


class DraftInput(DFlashDraftInputV2):
    """`bonus_tokens` i64 [R] is each request's last emitted token, whose KV is not stored yet."""

    def prepare_for_decode(self, batch) -> None:
        """Free window pages that slid out of reach, then reserve slots for the next step."""
        if not batch.reqs:
            return
        batch.maybe_evict_swa()
        table = batch.req_to_token_pool.req_to_token
        page = batch.token_to_kv_pool_allocator.page_size
        ahead = get_alloc_reserve_per_decode()
        committed = [req.kv_committed_len for req in batch.reqs]
        owned = [req.kv.kv_allocated_len for req in batch.reqs]
        reserved = [
            reserved_length(length, have, ahead, page, table.shape[1])
            for length, have in zip(committed, owned, strict=True)
        ]
        owned_cpu = torch.tensor(owned, dtype=torch.int32)
        reserved_cpu = torch.tensor(reserved, dtype=torch.int32)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=owned_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=owned_cpu,
            nxt_kv_lens=reserved_cpu.to(batch.device, non_blocking=True),
            nxt_kv_lens_cpu=reserved_cpu,
            num_needed_tokens=sum(reserved) - sum(owned),
            batch=batch,
        )
        for req in batch.reqs:
            req.decode_batch_idx += 1
        # Overlap scheduling replaces these by the published lengths.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        self.reserved_seq_lens_cpu = reserved_cpu
        self.reserved_seq_lens_sum = sum(reserved)


def draft_input(bonus: torch.Tensor, new_len: torch.Tensor) -> DraftInput:
    """The state after a step. bonus, new_len: i64 [R]."""
    requests, device = new_len.shape[0], new_len.device
    return DraftInput(
        topk_p=torch.empty((requests, 0), device=device),
        topk_index=torch.empty((requests, 0), dtype=torch.int64, device=device),
        bonus_tokens=bonus.to(torch.int64),
        new_seq_lens=new_len.to(torch.int64),
        hidden_states=torch.empty((requests, 0), device=device),
    )
