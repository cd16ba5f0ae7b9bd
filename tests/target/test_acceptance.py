"""The test checkpoints' promise: `--acceptance` sets how many drafts the target accepts."""

import pytest
import torch

from dspark.draft_model import block_ids, inject, run_block
from dspark.kernels.draft import markov_block
from dspark.kernels.step import draft_meta
from dspark.target.caches import PAGE_TOKENS, LayerCaches
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import ACCEPTANCE, make_checkpoint
from dspark.target.config import ModelConfig
from dspark.target.local import LocalTarget, Rows
from dspark.target.rope import rope_table
from dspark.target.weights import load_draft, load_target

PROMPT, STEPS, MAX_TOKENS = 40, 40, 512


class Speculation:
    """Greedy draft, verify, accept on one sequence in fp32: no server, no scheduling."""

    def __init__(self, directory):
        self.config = ModelConfig.from_checkpoint(directory)
        self.dspark = self.config.dspark
        self.draft = load_draft(directory, self.config)
        self.target = LocalTarget(
            load_target(directory, self.config),
            self.config,
            max_tokens=MAX_TOKENS,
            verify_rows=self.dspark.block_size + 1,
            dtype=torch.float32,
            capture_layers=frozenset(self.dspark.target_layer_ids),
        )
        self.rope = rope_table(self.config.rope_theta, MAX_TOKENS, None)
        pages = MAX_TOKENS // PAGE_TOKENS + 1
        self.caches = [
            LayerCaches(window=torch.full((pages, PAGE_TOKENS * 512), float("nan")))
            for _ in self.draft.blocks
        ]

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
        out = run_block(
            w.embed[ids].float(), ids, self.draft, w.head, self.config, self.rope, meta, self.caches
        )
        base = out.logits.view(1, gamma, -1)
        drafted = markov_block(
            base, torch.tensor([bonus]), self.draft.markov_w1.float(), self.draft.markov_w2
        )
        return drafted.tokens[0].tolist()

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Emitted tokens and accepted counts for each setting."""
    prompt = torch.randint(2, 511, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    results = {}
    for name in ("high", "medium", "low"):
        directory = tmp_path_factory.mktemp("acceptance") / name
        make_checkpoint(directory, presets.tiny(), alpha=ACCEPTANCE[name])
        results[name] = Speculation(directory).generate(prompt, STEPS)
    return results


@pytest.mark.parametrize(
    ("name", "least", "most"), [("high", 3.0, 4.9), ("medium", 1.0, 2.5), ("low", 0.3, 1.2)]
)
def test_mean_accepted_drafts(runs, name, least, most):
    accepted = runs[name][1]
    assert least < sum(accepted) / len(accepted) < most


def test_every_accept_length_occurs(runs):
    assert {count for _, accepted in runs.values() for count in accepted} == {0, 1, 2, 3, 4, 5}


def test_sequences_stay_varied_and_never_end_by_themselves(runs):
    for emitted, _ in runs.values():
        assert not {0, 1, 511} & set(emitted)  # bos, eos, noise
        assert len(set(emitted)) > len(emitted) / 3
