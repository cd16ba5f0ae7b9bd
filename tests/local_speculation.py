"""Greedy draft, verify, accept on one sequence: the library alone, no server, no scheduling."""

import torch

from dspark.bench.local_target import LocalTarget, Rows
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.draft import markov_block
from dspark.kernels.step import draft_meta
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

    def run(self, tokens: list[int], committed: int) -> list[int]:
        """Target argmax after each token; `commit` shows the draft the rows that stay."""
        out = self.target.forward([Rows(0, committed, tokens)])
        self.captures = torch.cat(out.captures, 1)
        return self.target.logits(out.hidden).argmax(1).tolist()

    def commit(self, count: int, committed: int) -> None:
        pos = torch.arange(committed, committed + count)
        loc = self.target.req_to_token[1, pos]
        inject(self.captures[:count], loc, pos, self.draft, self.config, self.rope, self.caches)

    def propose(self, bonus: int, committed: int) -> list[int]:
        gamma = self.dspark.block_size
        ids = block_ids(torch.tensor([bonus]), gamma, self.dspark.noise_token_id)
        meta = draft_meta(
            req_slot=torch.tensor([1]),
            prefix_len=torch.tensor([committed]),
            gamma=gamma,
            req_to_token=self.target.req_to_token,
            full_to_swa=self.target.full_to_swa,
            window=self.config.sliding_window,
            valid_from=torch.zeros(1, dtype=torch.int64),
        )
        w = self.target.weights
        embedded = w.embed[ids].to(self.dtype)
        forward = DraftForward(meta, self.rope, self.caches)
        out = run_block(embedded, ids, self.draft, w.head, self.config, forward)
        base = out.logits.view(1, gamma, -1)
        w1 = self.draft.markov_w1.to(self.dtype)
        return (
            markov_block(base, torch.tensor([bonus]), w1, self.draft.markov_w2).tokens[0].tolist()
        )

    def generate(self, prompt: list[int], steps: int) -> tuple[list[int], list[int]]:
        """Emitted tokens and how many drafts each step accepted."""
        emitted = [self.run(prompt, 0)[-1]]
        committed = len(prompt)
        self.commit(committed, 0)
        accepted = []
        for _ in range(steps):
            drafts = self.propose(emitted[-1], committed)
            verdict = self.run([emitted[-1], *drafts], committed)
            count = 0
            while count < len(drafts) and drafts[count] == verdict[count]:
                count += 1
            self.commit(count + 1, committed)
            committed += count + 1
            emitted += verdict[: count + 1]
            accepted.append(count)
        return emitted, accepted
