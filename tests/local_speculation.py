"""Greedy decode steps of one sequence by the step functions: no server, no scheduling."""

import torch
from greedy_steps import greedy_request, judge

from dspark.bench.local_target import LocalTarget, Rows
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.step import BlockRows, draft_meta
from dspark.speculation.accept import committed_slots
from dspark.speculation.propose import DraftHead, Proposal, propose
from dspark.speculation.sampling import Requests
from dspark.target.caches import PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, block_ids, inject, run_block
from dspark.target.rope import rope_table
from dspark.target.weights import load_draft, load_target

MAX_TOKENS = 512


class Speculation:
    """dtype: bf16 for served precision, fp32 for the unquantised oracle."""

    def __init__(self, directory, dtype: torch.dtype = torch.float32):
        self.config, self.dtype = ModelConfig.from_checkpoint(directory), dtype
        self.dspark = self.config.dspark
        self.draft = load_draft(directory, self.config)
        self.target = LocalTarget(
            load_target(directory, self.config),
            self.config,
            max_tokens=MAX_TOKENS,
            verify_width=self.dspark.block_size + 1,
            dtype=dtype,
            capture_layers=frozenset(self.dspark.target_layer_ids),
        )
        self.rope = rope_table(self.config.rope_theta, MAX_TOKENS, None)
        self.caches = [LayerCaches(window=self.window_pool()) for _ in self.draft.blocks]

    def window_pool(self) -> torch.Tensor:
        """Filled with NaN (or its byte pattern), so that a read before a write shows."""
        pages = MAX_TOKENS // PAGE_TOKENS + 1
        if self.dtype == torch.float32:
            return torch.full((pages, PAGE_TOKENS * 512), float("nan"))
        return torch.full((pages, page_stride(PAGE_TOKENS)), 255, dtype=torch.uint8)

    def run(self, tokens: list[int], committed: int) -> torch.Tensor:
        """f32 [len(tokens), N] target logits; `commit` shows the draft the rows that stay."""
        out = self.target.forward([Rows(0, committed, tokens)])
        self.captures = torch.cat(out.captures, 1)
        return self.target.logits(out.hidden)

    def commit(self, count: int, committed: int) -> None:
        """Show the draft the first `count` rows of the last `run`, and no others."""
        pos = torch.arange(committed, committed + len(self.captures))
        window_slot = self.target.tables.token_slot[1, pos.clamp(max=MAX_TOKENS - 1)][None]
        kept = committed_slots(window_slot, torch.tensor([count]))
        inject(self.captures, kept, pos, self.draft, self.config, self.rope, self.caches)

    def propose(self, requests: Requests) -> Proposal:
        gamma = self.dspark.block_size
        ids = block_ids(requests.bonus, gamma, self.dspark.noise_token_id)
        meta = draft_meta(
            BlockRows(requests.slot, requests.committed, torch.zeros(1, dtype=torch.int64), gamma),
            self.target.tables,
            window=self.config.sliding_window,
        )
        w = self.target.weights
        embedded = w.embed[ids].to(self.dtype)
        forward = DraftForward(meta, self.rope, self.caches)
        out = run_block(embedded, ids, self.draft, w.head, self.config, forward)
        head = DraftHead(
            self.draft.markov_w1.to(self.dtype),
            self.draft.markov_w2,
            self.draft.confidence,
            torch.ones(gamma),
            rank=0,
            group=None,
        )
        return propose(out.logits, out.hidden, requests, head, depth=gamma)

    def generate(self, prompt: list[int], steps: int) -> tuple[list[int], list[int]]:
        """Emitted tokens and how many drafts each step accepted."""
        emitted = [int(self.run(prompt, 0)[-1].argmax())]
        committed = len(prompt)
        self.commit(committed, 0)
        accepted = []
        for _ in range(steps):
            requests = greedy_request(1, committed, emitted[-1])
            proposal = self.propose(requests)
            logits = self.run([emitted[-1], *proposal.tokens[0].tolist()], committed)
            outcome = judge(requests, proposal, logits)
            count = int(outcome.commit_len)
            self.commit(count, committed)
            committed += count
            emitted += outcome.tokens[0, :count].tolist()
            accepted.append(count - 1)
        return emitted, accepted
