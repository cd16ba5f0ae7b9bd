"""Decode steps of the worker itself: what it emits, what it leaves behind, and that it never waits.

Asking the device for a value would make the host wait for the step in flight. Operators that copy
a value to the host, or whose output shape depends on values, are trapped while a step runs.
"""

import random

import pytest
import torch
from no_sync import NoSync
from served_batches import (
    GAMMA,
    VOCAB,
    StandIns,
    decode_batch,
    prompt_batch,
    request,
)

from dspark.host import step_costs
from dspark.speculation import step_cost, step_cost_cache
from dspark.speculation.draft_gate import COUNTS, EXPLORE
from dspark.speculation.settings import Settings
from dspark.speculation.step_cost import Steps
from dspark.speculation.step_timer import COUNTING, SETTLING, steps_of
from dspark.speculation.turn import DRAFT, NO_DRAFT

SLOT = torch.tensor([2, 5, 3])
PROMPTS = [125, 7, 300]  # the first request's verify rows cross a C128 boundary
TRUTH = torch.arange(20, 40)  # what the target says after any prompt
WIDTH = GAMMA + 1
CERTAIN = 9.0 * torch.eye(VOCAB)


def follow_truth(candidates: torch.Tensor) -> torch.Tensor:
    """Logits of a target that continues TRUTH after whichever of its tokens it sees."""
    return CERTAIN[(candidates + 1).flatten() % VOCAB]


def served(
    monkeypatch,
    wishes,
    target=follow_truth,
    each=({}, {}, {}),
    texts=None,
    **sampling,
):
    """(stand-ins, worker, first decode batch) after the prompts.

    wishes: kinds of forced drafts, of `texts` (TRUTH). each: sampling of each request, `sampling`
    that of all.
    """
    monkeypatch.setenv("DSPARK_FORCED_DRAFTS", "1")
    stand_ins = StandIns(target, WIDTH)
    worker = stand_ins.worker(monkeypatch)
    reqs = [
        request(n, f"r{i}", **sampling, **own)
        for i, (n, own) in enumerate(zip(PROMPTS, each, strict=True))
    ]
    for req, kind, text in zip(reqs, wishes, texts or [TRUTH.tolist()] * 3, strict=True):
        if kind is not None:
            wish = {"draft": kind, "continuation": text}
            req.sampling_params.custom_params = wish
    stand_ins.prompt = CERTAIN[TRUTH[[0, 0, 0]]]
    stand_ins.state.slots.assigned(SLOT.tolist())
    stand_ins.state.begin_forward()
    prompts = prompt_batch(reqs, SLOT)
    result = worker.forward_batch_generation(prompts)
    return stand_ins, worker, decode_batch(prompts, result)


def test_the_trap_works():
    with pytest.raises(AssertionError), NoSync():
        torch.tensor([1.0]).sum().item()
    x = torch.arange(3)
    with pytest.raises(AssertionError), NoSync():
        x[x > 1]


def normalised(sampling: dict) -> dict:
    """SGLang turns temperature 0 into top_k 1 when it takes a request in."""
    return {"temperature": 1.0, "top_k": 1} if sampling.get("temperature") == 0 else sampling


@pytest.mark.parametrize("mode", ["static", "scheduled", "cap-accept"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "sampled", "cut", "penalised"],
)
def test_a_step_never_waits_for_the_device(monkeypatch, mode, sampling):
    monkeypatch.setenv("DSPARK_VERIFY", mode)
    # The torch reference of the rollback picks rows by a mask; on a GPU it is one launch.
    monkeypatch.setenv("DSPARK_KEEP_REJECTED", "1")
    penalties = {k: v for k, v in sampling.items() if k.endswith("penalty")}
    wishes = [None, "wrong@2", "random"]
    _, worker, batch = served(monkeypatch, wishes, **normalised(sampling) | penalties)
    worker.set_dspark_forced_budget_frac(0.5)
    worker.packs = False  # as on a GPU
    published = []
    with NoSync():
        result = worker.forward_batch_generation(batch, on_publish=published.append)
    assert published == [result.new_seq_lens]
    assert torch.equal(result.new_seq_lens, batch.seq_lens + result.accept_lens)


def test_a_step_emits_what_the_target_says_and_no_more_than_was_right(monkeypatch):
    _, worker, batch = served(monkeypatch, ["oracle", "wrong@2", "wrong"], top_k=1)
    result = worker.forward_batch_generation(batch)
    assert result.accept_lens.tolist() == [6, 3, 1]
    emitted = result.next_token_ids.view(3, WIDTH)
    for row, count in zip(emitted, result.accept_lens.tolist(), strict=True):
        assert row[:count].tolist() == TRUTH[1 : count + 1].tolist()
    following = worker.forward_batch_generation(decode_batch(batch, result))
    first = following.next_token_ids.view(3, WIDTH)[:, 0]
    assert first.tolist() == [27, 24, 22]  # the truth after 6, 3 and 1 more tokens


def test_a_budget_of_nothing_runs_one_row_a_request(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    stand_ins, worker, batch = served(monkeypatch, ["oracle"] * 3, top_k=1)
    worker.set_dspark_forced_budget_frac(0.0)
    result = worker.forward_batch_generation(batch)
    assert result.accept_lens.tolist() == result.cap_lens.tolist() == [1, 1, 1]
    assert stand_ins.rows_run[SLOT].tolist() == [1, 1, 1]
    assert stand_ins.launched == [3]


def test_rejected_rows_reach_neither_the_draft_nor_a_later_window(monkeypatch):
    stand_ins, worker, batch = served(monkeypatch, ["wrong@2", "wrong", "oracle"], top_k=1)
    ring = stand_ins.state.geometry.c128.ring
    rings = stand_ins.state.pools.layer("c128", 0).view(-1, ring, 1024)
    rings[SLOT] = 7.0  # as if every row had been written
    worker.forward_batch_generation(batch)

    window_slot, position = stand_ins.injected[-1]
    committed = [3, 1, 6]
    for i, (slot, length) in enumerate(zip(SLOT.tolist(), PROMPTS, strict=True)):
        expected = torch.full((WIDTH,), -1)
        kept = torch.arange(length, length + committed[i])
        expected[: committed[i]] = stand_ins.window[stand_ins.table[slot, kept].long()]
        assert window_slot.view(3, WIDTH)[i].tolist() == expected.tolist()
        assert position.view(3, WIDTH)[i].tolist() == list(range(length, length + WIDTH))
        rejected = torch.arange(length + committed[i], length + WIDTH) % ring
        emptied = (rings[slot, :, :512] == 0).all(-1).nonzero().flatten()
        assert emptied.tolist() == sorted(rejected.tolist())


def test_kept_rejected_rows_are_left_as_they_are(monkeypatch):
    monkeypatch.setenv("DSPARK_KEEP_REJECTED", "1")
    stand_ins, worker, batch = served(monkeypatch, ["wrong"] * 3, top_k=1)
    stand_ins.state.pools.layer("c128", 0)[:] = 7.0
    worker.forward_batch_generation(batch)
    assert (stand_ins.state.pools.layer("c128", 0) == 7.0).all()


def test_a_request_without_usable_logits_emits_minus_one_beside_its_neighbours(monkeypatch):
    def broken_for_the_second(candidates):
        logits = follow_truth(candidates)
        logits.view(3, WIDTH, VOCAB)[1] = -torch.inf
        return logits

    _, worker, batch = served(monkeypatch, ["oracle"] * 3, broken_for_the_second, top_k=1)
    result = worker.forward_batch_generation(batch)
    emitted = result.next_token_ids.view(3, WIDTH)
    assert result.accept_lens.tolist() == [6, 1, 6]
    assert emitted[1, 0] == -1
    assert emitted[[0, 2]].tolist() == [TRUTH[1:7].tolist()] * 2


def wavering(candidates: torch.Tensor) -> torch.Tensor:
    """Logits of a target that mostly follows TRUTH, but looks at every token before."""
    before = candidates.double().cumsum(1)[..., None]
    doubt = 4 * torch.sin(before * torch.arange(1, VOCAB + 1))
    return follow_truth(candidates) + doubt.float().flatten(0, 1)


ASKED = {
    "greedy": [{"top_k": 1}] * 3,
    "sampled": [{"temperature": 1.0}] * 3,
    "seeded": [{"temperature": 1.3, "sampling_seed": 7 + i} for i in range(3)],
    "cut": [{"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01}] * 3,
    "mixed": [{"top_k": 1}, {"temperature": 1.0, "top_p": 0.8}, {"sampling_seed": 3}],
    "penalised": [{"top_k": 1, "frequency_penalty": 0.3}, {"repetition_penalty": 1.2}, {}],
}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_packed_rows_decide_what_padded_ones_do(monkeypatch, asked, share):
    """Four steps in both layouts: the same tokens, lengths, ring rows and rows for the draft."""
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    runs = []
    for packs in (True, False):
        stand_ins, worker, batch = served(monkeypatch, ["oracle", "wrong@2", None], wavering, asked)
        worker.packs = packs
        worker.set_dspark_forced_budget_frac(share)
        results, kept = [], []
        for _ in range(4):
            result = worker.forward_batch_generation(batch)
            slot, position = stand_ins.injected[-1]
            kept += zip(slot[slot >= 0].tolist(), position[slot >= 0].tolist(), strict=True)
            results.append((result.next_token_ids.tolist(), result.accept_lens.tolist()))
            results.append((result.new_seq_lens.tolist(), result.block_accept_lens.tolist()))
            assert stand_ins.launched.pop() == (int(result.cap_lens.sum()) if packs else 18)
            batch = decode_batch(batch, result)
        runs.append((results, kept, stand_ins.state.pools.tensors["c128"].clone()))
    assert runs[0][:2] == runs[1][:2]
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_packed_request_without_usable_logits_leaves_its_neighbours_alone(monkeypatch, share):
    def broken_for_the_second(candidates):
        logits = follow_truth(candidates)
        logits.view(3, WIDTH, VOCAB)[1] = -torch.inf
        return logits

    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    stand_ins, worker, batch = served(
        monkeypatch, ["oracle"] * 3, broken_for_the_second, [{"top_k": 1}] * 3
    )
    worker.set_dspark_forced_budget_frac(share)
    result = worker.forward_batch_generation(batch)
    emitted = result.next_token_ids.view(3, WIDTH)
    run = stand_ins.rows_run[SLOT].tolist()
    assert stand_ins.launched == [sum(run)]
    assert result.accept_lens.tolist() == [run[0], 1, run[2]]
    assert emitted[1, 0] == -1
    for row, count in ((0, run[0]), (2, run[2])):
        assert emitted[row, :count].tolist() == TRUTH[1 : count + 1].tolist()


def learned(worker) -> dict:
    return worker.dump_info_records()["online_calibration"]


@pytest.mark.parametrize("mode", ["scheduled", "cap-accept"])
def test_confidences_are_corrected_by_what_was_verified(monkeypatch, mode):
    """Of 5, 2 and 0 right drafts with rows of their own: 5, 3 and 1 were judged."""
    monkeypatch.setenv("DSPARK_VERIFY", mode)
    each = [{"top_k": 1}, {"temperature": 1.0, "sampling_seed": 4}, {"top_k": 1}]
    _, worker, batch = served(monkeypatch, ["oracle", "wrong@2", "wrong"], each=each)
    worker.forward_batch_generation(batch)
    assert learned(worker)["greedy"]["tested"] == [2, 1, 1, 1, 1]
    assert learned(worker)["sampled"]["tested"] == [1, 1, 1, 0, 0]
    worker.clear_info_records()
    worker.forward_batch_generation(batch)
    assert learned(worker)["greedy"]["tested"][1:] == [1, 1, 1, 1]


def test_drafts_without_a_row_teach_nothing(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    _, worker, batch = served(monkeypatch, ["oracle"] * 3, top_k=1)
    worker.set_dspark_forced_budget_frac(0.0)
    worker.forward_batch_generation(batch)
    assert learned(worker)["greedy"]["tested"] == [0] * GAMMA


def test_what_was_learned_decides_which_drafts_have_rows(monkeypatch):
    """Many steps in which sampled drafts were right and greedy ones were not."""
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    each = [{"top_k": 1}, {"temperature": 1.0, "sampling_seed": 4}, {"top_k": 1}]
    stand_ins, worker, batch = served(monkeypatch, [None] * 3, each=each)
    sampled = torch.tensor([False, True, False])
    for trust in torch.linspace(0.0, 1.0, 240):
        worker.calibration.learn(
            trust.expand(3, GAMMA), sampled, torch.tensor([0, 5, 0]), torch.tensor([6, 6, 6])
        )
    worker.set_dspark_forced_budget_frac(1 / 3)
    worker.forward_batch_generation(batch)
    assert stand_ins.rows_run[SLOT].tolist() == [1, 6, 1]


def test_static_verification_learns_nothing(monkeypatch):
    _, worker, batch = served(monkeypatch, ["oracle"] * 3, top_k=1)
    worker.forward_batch_generation(batch)
    assert learned(worker) is None


MARKOV = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def looks_back(candidates: torch.Tensor) -> torch.Tensor:
    """Logits of a target that looks at the last token only, wherever a step begins."""
    return MARKOV[candidates.flatten()].clone()


class Scripted:
    """A gate that gives these turns, then pauses for ever."""

    without_draft = 0

    def __init__(self, turns):
        self.turns, self.results = list(turns), []

    def turn(self, sampled):
        return self.turns.pop(0) if self.turns else NO_DRAFT

    def record(self, results):
        self.results += results


TURNS = (NO_DRAFT, DRAFT, EXPLORE, DRAFT._replace(measured=3), DRAFT._replace(measured=0))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "asked", [each for name, each in ASKED.items() if name in ("greedy", "seeded", "penalised")]
)
def test_whatever_the_host_decides_the_tokens_are_those_of_the_target(monkeypatch, asked, packs):
    """Random turns against steps that never draft, and draft latents of every committed row."""
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    asked = [each | {"sampling_seed": 5 + i} for i, each in enumerate(asked)]
    chance, truth, lengths = random.Random(4), None, set()
    for turns in ([], *(chance.choices(TURNS, k=12) for _ in range(5))):
        wishes = ["wrong@1", "oracle", None] if truth else [None] * 3
        stand_ins, worker, batch = served(monkeypatch, wishes, looks_back, asked, truth or [[]] * 3)
        worker.packs, worker.gate = packs, Scripted(turns)
        worker.scheduler.cost = (Steps(3, (3, 18), (0.1, 0.11)),)
        texts = [[token] for token in batch.spec_info.bonus_tokens.tolist()]
        while min(map(len, texts)) < 20:
            before = batch.seq_lens.tolist()
            result = worker.forward_batch_generation(batch)
            lengths |= set(result.accept_lens.tolist())
            rows = zip(result.next_token_ids.view(3, WIDTH), result.accept_lens, strict=True)
            for text, (tokens, count) in zip(texts, rows, strict=True):
                text += tokens[:count].tolist()
            slot, position = stand_ins.injected[-1]
            kept = zip(before, result.new_seq_lens.tolist(), strict=True)
            assert sorted(position[slot >= 0].tolist()) == sorted(
                n for a, b in kept for n in range(a, b)
            )
            batch = decode_batch(batch, result)
        truth = truth or [text[:30] for text in texts]
        assert [text[:20] for text in texts] == [text[:20] for text in truth]
    assert {1, 2, 6} <= lengths


def test_a_step_without_a_draft_runs_one_row_a_request_and_no_draft(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    each = [{"top_k": 1}, {"temperature": 1.0}, {"sampling_seed": 3}]
    stand_ins, worker, batch = served(monkeypatch, ["oracle"] * 3, each=each)
    worker.gate = Scripted([])
    result = worker.forward_batch_generation(batch)
    assert (stand_ins.drafted, stand_ins.launched) == (0, [3])
    assert result.accept_lens.tolist() == result.cap_lens.tolist() == [1, 1, 1]
    assert result.turn == NO_DRAFT


def test_a_step_without_a_draft_never_waits_for_the_device(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    monkeypatch.setenv("DSPARK_KEEP_REJECTED", "1")
    _, worker, batch = served(monkeypatch, [None] * 3, temperature=1.0)
    worker.packs, worker.gate = False, Scripted([EXPLORE])
    with NoSync():
        result = worker.forward_batch_generation(batch)
    batch = decode_batch(batch, result)
    with NoSync():
        worker.forward_batch_generation(batch)


def test_only_steps_that_count_tell_whether_drafting_pays(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    _, worker, _ = served(monkeypatch, [None] * 3, top_k=1)
    worker.gate = Scripted([])
    for turn in (NO_DRAFT, EXPLORE, DRAFT, COUNTS, DRAFT._replace(measured=3)):
        worker.on_verify_complete_cpu([2, 0], 2, [4, 1], [False, True], turn)
    assert worker.gate.results == [(False, 2, 3), (True, 0, 0)]
    assert worker.monitor.report()["verify_steps"] == 8


@pytest.mark.parametrize(
    ("mode", "table", "gated"),
    [
        ("static", True, False),
        ("scheduled", True, True),
        ("cap-accept", True, False),
        ("scheduled", False, False),
    ],
)
def test_drafting_may_pause_where_steps_have_a_cost_and_a_schedule(
    monkeypatch, tmp_path, mode, table, gated
):
    monkeypatch.setenv("DSPARK_VERIFY", mode)
    if table:
        step_cost.save((Steps(1, (1, 6), (0.1, 0.2), 0.05),), tmp_path / "cost.json")
        monkeypatch.setenv("DSPARK_STEP_COST", str(tmp_path / "cost.json"))
    _, worker, _ = served(monkeypatch, [None] * 3, top_k=1)
    assert (worker.gate is not None) == gated
    assert worker.dump_info_records()["step_cost"] == ("given" if table else None)


def test_drafts_that_are_never_right_are_paused(monkeypatch, tmp_path):
    """The worker and its own gate: a draft doubles the time of a step and brings nothing."""
    step_cost.save((Steps(3, (3, 18), (0.1, 0.2), 0.05),), tmp_path / "cost.json")
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    monkeypatch.setenv("DSPARK_STEP_COST", str(tmp_path / "cost.json"))
    stand_ins, worker, batch = served(monkeypatch, ["wrong"] * 3, top_k=1)
    for _ in range(30):
        result = worker.forward_batch_generation(batch)
        right = [n - 1 for n in result.accept_lens.tolist()]
        worker.on_verify_complete_cpu(right, 3, result.cap_lens.tolist(), [False] * 3, result.turn)
        batch = decode_batch(batch, result)
    assert worker.gate.without_draft > 20
    assert stand_ins.drafted == 30 - worker.gate.without_draft
    worker.set_dspark_forced_budget_frac(0.5)  # a measurement that wants every draft
    assert worker.forward_batch_generation(batch).turn == DRAFT


def test_steps_are_measured_and_the_table_is_used_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    monkeypatch.setattr(step_costs, "describe", lambda *_: {"here": 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Settings, "measures_steps", True)
    stand_ins, worker, batch = served(monkeypatch, ["oracle"] * 3, top_k=1)
    assert worker.dump_info_records()["step_cost"] == "not measured"
    worker.measure_steps(True)
    for _ in range(steps_of(GAMMA) + 1):
        result = worker.forward_batch_generation(batch)
        assert result.accept_lens.tolist() == [1, 1, 1]
        batch = decode_batch(batch, result)
    assert stand_ins.launched[:: SETTLING + COUNTING] == [18, 3, 3, 9, 6, 18]
    worker.measure_steps(False)
    assert worker.dump_info_records()["step_cost"] == "measured at start"
    (steps,) = worker.scheduler.cost
    assert (steps.requests, steps.rows) == (3, (3, 6, 9, 18))
    assert steps.without_draft is not None
    _, again, _ = served(monkeypatch, ["oracle"] * 3, top_k=1)
    assert again.dump_info_records()["step_cost"] == "measured at an earlier start"
    assert again.scheduler.cost == step_cost_cache.find({"here": 1})


def test_too_few_steps_make_no_table(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DSPARK_VERIFY", "scheduled")
    monkeypatch.setattr(step_costs, "describe", lambda *_: {"here": 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Settings, "measures_steps", True)
    _, worker, batch = served(monkeypatch, ["oracle"] * 3, top_k=1)
    worker.measure_steps(True)
    worker.forward_batch_generation(batch)
    worker.measure_steps(False)
    assert "Steps could not be measured" in caplog.text
    assert worker.dump_info_records()["step_cost"] == "not measured"
    assert worker.timer is None
