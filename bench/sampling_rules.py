"""What it costs to judge drafts by the target's own draw instead of by rejection sampling.

    python -m dspark.bench.sampling_rules bench/results/sampling-rules.json

The embedded target continues held-out prompts by itself, sampled. On those texts both rules are
replayed with the same model outputs: at every place the draft proposes a block, and the chance of
each draft to be kept is computed, given that the target emits the token y with probability p(y)
and the draft proposes it with q(y):

* by rejection min(1, q(y) / p(y));
* by coupling 1 / sum_z max(p(z), q(z) p(y) / q(y)): the chance that one Gumbel noise, added to both
  log-probabilities, has its largest sum at y for the draft too, given that it has for the target.

From these follows the expected number of blocks a server would have run over each text. No draw
but the text itself is involved, and both rules share it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark import embedded
from dspark.bench.environment import describe
from dspark.bench.local_target import LocalTarget, Rows
from dspark.bench.prompts import load_tokenizer
from dspark.kernels.accept.reference import softmax
from dspark.kernels.common import rng
from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.linear import bf16_linear
from dspark.kernels.step import BlockRows, draft_meta
from dspark.target.caches import PAGE_TOKENS, LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, block_ids, inject, run_block
from dspark.target.rope import rope_table
from dspark.target.weights import load_draft, load_target

TEMPERATURES = (0.3, 0.7, 1.0)
PROMPT = 96  # tokens of a held-out prompt that are used


class Texts(NamedTuple):
    """S sequences the target wrote; position i of `logits` is the law of token PROMPT + i."""

    ids: torch.Tensor  # i64 [S, PROMPT + new]
    logits: torch.Tensor  # f32 [S, new, N]
    captures: torch.Tensor  # [S, PROMPT + new - 1, width] what the draft learns of each token


class Chances(NamedTuple):
    """Of each draft of the block at each anchor to be kept; f64 [S, anchors, gamma]."""

    rejection: torch.Tensor
    coupling: torch.Tensor


class Bench:
    """Target and draft of a checkpoint, and memory for `sequences` sequences."""

    def __init__(self, directory: Path, sequences: int, new_tokens: int):
        self.config = ModelConfig.from_checkpoint(directory)
        assert self.config.dspark is not None, "the embedded checkpoint has a draft"
        self.dspark, self.new_tokens = self.config.dspark, new_tokens
        self.draft = load_draft(directory, self.config)
        longest = PROMPT + new_tokens + self.dspark.block_size
        self.target = LocalTarget(
            load_target(directory, self.config),
            self.config,
            max_tokens=longest,
            sequences=sequences,
            capture_layers=frozenset(self.dspark.target_layer_ids),
        )
        self.rope = rope_table(self.config.rope_theta, longest, None)
        shape = (len(self.target.tables.window_slot) // PAGE_TOKENS, page_stride(PAGE_TOKENS))
        self.caches = [
            LayerCaches(window=torch.full(shape, 255, dtype=torch.uint8)) for _ in self.draft.blocks
        ]

    def write(self, prompts: list[list[int]], temperature: float, seed: torch.Tensor) -> Texts:
        """Continue each prompt, one token at a time. seed: i64 [S]."""
        ids = torch.tensor(prompts)
        out = self.target.forward([Rows(s, 0, p) for s, p in enumerate(prompts)], store_all=False)
        captures = [torch.cat(out.captures, 1).view(len(prompts), PROMPT, -1)]
        last = self.target.logits(out.hidden.view(len(prompts), PROMPT, -1)[:, -1])
        laws = []
        for i in range(self.new_tokens):
            laws.append(last)
            noise = noise_at(seed[:, None], torch.tensor([PROMPT + i]), last.shape[1])[:, 0]
            ids = torch.cat([ids, (last + temperature * noise).argmax(1, keepdim=True)], 1)
            if i + 1 == self.new_tokens:
                break
            rows = [Rows(s, PROMPT + i, [int(t)]) for s, t in enumerate(ids[:, -1])]
            out = self.target.forward(rows)
            captures.append(torch.cat(out.captures, 1)[:, None])
            last = self.target.logits(out.hidden)
        return Texts(ids, torch.stack(laws, 1), torch.cat(captures, 1))

    @torch.no_grad()
    def replay(self, texts: Texts, temperature: float) -> Chances:
        """Judge the block at every anchor PROMPT, PROMPT + 1, ... that the text reaches over."""
        gamma = self.dspark.block_size
        rejection, coupling = [], []
        self._inject(texts, 0, PROMPT)
        for i in range(self.new_tokens - gamma):
            at = PROMPT + i  # the anchor: the last emitted token
            truth = texts.ids[:, at + 1 : at + 1 + gamma, None]
            t = torch.tensor(temperature)
            q = softmax(self._draft_logits(texts, at), t)
            p = softmax(texts.logits[:, i + 1 : i + 1 + gamma], t)
            ratio = p.gather(-1, truth) / q.gather(-1, truth)
            rejection.append((1 / ratio[..., 0]).clamp(max=1))
            coupling.append(1 / torch.maximum(p, q * ratio).sum(-1))
            self._inject(texts, at, at + 1)
        return Chances(torch.stack(rejection, 1), torch.stack(coupling, 1))

    def _draft_logits(self, texts: Texts, at: int) -> torch.Tensor:
        """f32 [S, gamma, N] of the block at an anchor, each row given the text before it."""
        gamma, sequences = self.dspark.block_size, len(texts.ids)
        ids = block_ids(texts.ids[:, at], gamma, self.dspark.noise_token_id)
        meta = draft_meta(
            BlockRows(
                1 + torch.arange(sequences),
                torch.full((sequences,), at),
                torch.zeros(sequences, dtype=torch.int64),
                gamma,
            ),
            self.target.tables,
            window=self.config.sliding_window,
        )
        head, embed = self.target.weights.head, self.target.weights.embed
        embedded = embed[ids].to(torch.bfloat16)
        forward = DraftForward(meta, self.rope, self.caches)
        out = run_block(embedded, ids, self.draft, head, self.config, forward)
        w1 = self.draft.markov_w1.to(torch.bfloat16)
        bias = bf16_linear(
            w1[texts.ids[:, at : at + gamma].flatten()], self.draft.markov_w2, torch.float32
        )
        return (out.logits + bias).view(sequences, gamma, -1)

    def _inject(self, texts: Texts, first: int, end: int) -> None:
        sequences = len(texts.ids)
        pos = torch.arange(first, end).repeat(sequences)
        window_slot = self.target.tables.token_slot[1 : sequences + 1, first:end].flatten()
        rows = texts.captures[:, first:end].flatten(0, 1)
        inject(rows, window_slot, pos, self.draft, self.config, self.rope, self.caches)


def noise_at(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """f32 [S, P, N] Gumbel noise. seed: i64 [S, 1]; position: i64 [P]."""
    of = rng.stream(seed, position, rng.TOKEN)
    return rng.gumbel(rng.Stream(of.a[..., None], of.b[..., None]), torch.arange(vocab))


def tokens_per_step(chances: torch.Tensor) -> float:
    """Tokens a block emits on average. chances: f64 [S, anchors, gamma] of each draft."""
    sequences, anchors, gamma = chances.shape
    reached = torch.cat([torch.ones(sequences, anchors, 1), chances.cumprod(-1)], -1)
    exactly = reached - torch.cat([reached[..., 1:], torch.zeros(sequences, anchors, 1)], -1)
    starts = torch.zeros(sequences, anchors + gamma + 1, dtype=torch.float64)  # of a block there
    starts[:, 0] = 1
    for at in range(anchors):
        starts[:, at + 1 : at + 2 + gamma] += starts[:, at, None] * exactly[:, at]
    blocks = starts[:, :anchors]
    return float((blocks * reached.sum(-1)).sum() / blocks.sum())


def measure(new_tokens: int, repeats: int) -> dict[str, Any]:
    """Figures of both rules by kind of text and temperature."""
    tokenizer = load_tokenizer(embedded.checkpoint())
    figures: dict[str, Any] = {}
    for kind, prompts in embedded.held_out().items():
        ids = [tokenizer.encode(text, add_special_tokens=False)[:PROMPT] for text in prompts]
        ids = [row for row in ids if len(row) == PROMPT] * repeats
        for temperature in TEMPERATURES:
            bench = Bench(embedded.checkpoint(), len(ids), new_tokens)
            texts = bench.write(ids, temperature, torch.arange(len(ids)))
            chances = bench.replay(texts, temperature)
            rates = {rule: tokens_per_step(each) for rule, each in chances._asdict().items()}
            cost = 1 - rates["coupling"] / rates["rejection"]
            figures[f"{kind}, T={temperature}"] = {
                "tokens_per_step": rates,
                "first_draft": {k: float(c[..., 0].mean()) for k, c in chances._asdict().items()},
                "cost": cost,
            }
            print(
                f"{kind}, T={temperature}: rejection {rates['rejection']:.3f}, "
                f"coupling {rates['coupling']:.3f} tokens a step, cost {cost:.1%}",
                flush=True,
            )
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.sampling_rules")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=1, help="continuations of each prompt")
    arguments = parser.parse_args(argv)
    record = {
        "environment": describe(),
        "prompt_tokens": PROMPT,
        "new_tokens": arguments.tokens,
        "figures": measure(arguments.tokens, arguments.repeats),
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
