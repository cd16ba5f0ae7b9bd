"""What a verify step leaves behind equals the state of a run that never drafted.

The target runs on its real pools and rings, verify steps with forced drafts on one side, one
token at a time on the other. Everything a later step can read must be equal bit for bit; C128
rows of rejected drafts must be empty where clearing is on, and may hold anything where it is off.
"""

import pytest
import torch
from greedy_steps import given, greedy_request, judge

from dspark.bench.local_target import LocalTarget, Rows
from dspark.kernels.common.kv_pages import load_slots
from dspark.state import RingRollback
from dspark.target.caches import C4_PER_PAGE, C128_PER_PAGE, PAGE_TOKENS
from dspark.target.config import ModelConfig
from dspark.target.weights import load_target

V = 6
MAX_TOKENS = 512


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    config = ModelConfig.from_checkpoint(tiny_checkpoint)
    return load_target(tiny_checkpoint, config), config


@pytest.fixture(scope="module")
def plain(model):
    """The never-drafting run: tokens, and a snapshot of live state at each length."""
    return PlainRun(*model)


def target(weights, config):
    return LocalTarget(weights, config, max_tokens=MAX_TOKENS, verify_width=V)


class PlainRun:
    def __init__(self, weights, config, prompt_len=115, new_tokens=60):
        self.run = target(weights, config)
        generator = torch.Generator().manual_seed(8)
        prompt = torch.randint(2, 500, (prompt_len,), generator=generator).tolist()
        self.prompt_len = prompt_len
        out = self.run.forward([Rows(0, 0, prompt)], store_all=False)
        self.tokens = [*prompt, int(self.run.logits(out.hidden[-1:]).argmax())]
        self.live = {prompt_len: live_state(self.run, prompt_len)}
        for length in range(prompt_len, prompt_len + new_tokens):
            out = self.run.forward([Rows(0, length, self.tokens[length : length + 1])])
            self.tokens.append(int(self.run.logits(out.hidden).argmax()))
            self.live[length + 1] = live_state(self.run, length + 1)


def live_state(run: LocalTarget, length: int) -> list[torch.Tensor]:
    """Everything a forward starting at `length` may read of slot 1's past."""
    table = run.tables.token_slot[1].long()
    found = []
    for cache, ratio in zip(run.caches, run.config.compress_ratios, strict=True):
        window = table[max(0, length - run.config.sliding_window) : length]
        found.append(load_slots(cache.window, PAGE_TOKENS, run.tables.window_slot[window]))
        if ratio == 0:
            continue
        per_page = C4_PER_PAGE if ratio == 4 else C128_PER_PAGE
        closed = table[ratio - 1 : length : ratio] // ratio
        found.append(load_slots(cache.compressed, per_page, closed))
        if ratio == 128:
            ring = run.geometry.c128.ring
            open_rows = torch.arange(length // 128 * 128, length) % ring + ring
            found.append(cache.state[open_rows])
            continue
        page, offset = closed // C4_PER_PAGE, closed % C4_PER_PAGE
        keys = cache.index.view(len(cache.index), -1)
        codes = keys[:, : C4_PER_PAGE * 128].view(-1, C4_PER_PAGE, 128)
        scales = keys[:, C4_PER_PAGE * 128 :].view(-1, C4_PER_PAGE, 4)
        found += [codes[page, offset], scales[page, offset]]
        ring = run.geometry.c4.ring
        window_slot = run.tables.window_slot[table[max(0, length // 4 * 4 - 4) : length]]
        rows = window_slot // PAGE_TOKENS * ring + window_slot % ring
        found += [cache.state[rows], cache.index_state[rows]]
    return [t.clone() for t in found]


def rejected_rows(run: LocalTarget, first: int, last: int) -> torch.Tensor:
    ring = run.geometry.c128.ring
    rows = torch.arange(first, last) % ring + ring
    return run.state.layer("c128", 0)[rows]


@pytest.mark.parametrize("clearing", [True, False])
@pytest.mark.parametrize(
    "accepts",
    [[0], [5], [2], [0, 5], [1, 3, 0, 4, 2]],
    ids=["none", "all", "two", "alternating", "mixed"],
)
def test_state_after_every_verify_step(model, plain, accepts, clearing):
    """Crosses a C128 boundary at 128 and C4 boundaries everywhere, at every offset."""
    run = target(*model)
    run.forward([Rows(0, 0, plain.tokens[: plain.prompt_len])], store_all=False)
    length, step = plain.prompt_len, 0
    while length + V < len(plain.tokens):
        right = accepts[step % len(accepts)]
        rows = plain.tokens[length : length + V]
        rows[right + 1 :] = [(t + 1) % 500 for t in rows[right + 1 :]]
        out = run.forward([Rows(0, length, rows)])
        requests = greedy_request(1, length, rows[0])
        outcome = judge(requests, given(rows[1:]), run.logits(out.hidden))
        commit = int(outcome.commit_len)
        assert commit == right + 1
        assert int(outcome.bonus) == plain.tokens[length + commit]
        if clearing:
            RingRollback(run.state).after_verify(
                requests.slot, requests.committed, outcome.commit_len, torch.tensor([V])
            )
            kv, score = rejected_rows(run, length + commit, length + V).split(512, 1)
            assert (kv == 0).all()
            assert (score == -torch.inf).all()
        length += commit
        step += 1
        for ours, theirs in zip(live_state(run, length), plain.live[length], strict=True):
            assert torch.equal(ours, theirs), f"length {length}"


@pytest.mark.parametrize("rows", range(1, V + 1))
def test_verify_rows_give_the_bits_of_single_decode_steps(model, plain, rows):
    """Logits and captures of a row do not depend on how many rows run with it."""
    weights, config = model
    layers = frozenset(config.dspark.target_layer_ids)
    length = 126
    outputs = []
    for width in (1, rows):
        run = LocalTarget(
            weights, config, max_tokens=MAX_TOKENS, verify_width=V, capture_layers=layers
        )
        run.forward([Rows(0, 0, plain.tokens[:length])], store_all=False)
        hidden, captures = [], []
        for first in range(length, length + rows, width):
            out = run.forward([Rows(0, first, plain.tokens[first : first + width])])
            hidden.append(out.hidden)
            captures.append(torch.cat(out.captures, 1))
        outputs.append((torch.cat(hidden), torch.cat(captures)))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
