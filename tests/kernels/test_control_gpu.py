"""The ops around a step on a GPU: the reference's values, deterministic, graph-safe, any size."""

import random

import pytest
import torch

from dspark.kernels import accept, collective, draft, schedule, state, step
from dspark.kernels.accept import reference as accept_reference
from dspark.kernels.collective import reference as collective_reference
from dspark.kernels.draft import reference as draft_reference
from dspark.kernels.linear import prepare_bf16
from dspark.kernels.schedule import reference as schedule_reference
from dspark.kernels.state import reference as state_reference
from dspark.kernels.step import reference as step_reference
from dspark.kernels.tooling.launch_counts import count_launches

pytestmark = pytest.mark.gpu

VOCAB, RANK, GAMMA, V = 129_280, 256, 5, 6
PAGE = 256


def to(device, value):
    """Move a tensor, or every tensor of a dict or NamedTuple."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: to(device, v) for k, v in value.items()}
    if isinstance(value, tuple):
        moved = [to(device, v) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


def assert_equal(got, want):
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name


def captured(function):
    """(graph, output) after two warm-up calls on a side stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph, output


# --- step ---------------------------------------------------------------------------------------


def step_problem(total=8 * V, width: int | None = V, requests=8, slots=9, pages=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randperm(slots * pages, generator=generator) + 1
    window = torch.randperm(slots * pages, generator=generator) + 1
    token = torch.arange(PAGE)
    token_slot = (full.view(slots, pages, 1) * PAGE + token).view(slots, -1).int()
    window_slot = torch.zeros((slots * pages + 1) * PAGE, dtype=torch.int64)
    window_slot[full[:, None] * PAGE + token] = window[:, None] * PAGE + token
    rows = step.BatchRows(
        torch.randperm(slots - 1, generator=generator)[:requests] + 1,
        torch.randint(0, pages * PAGE - V, (requests,), generator=generator),
        torch.randint(1, V + 1, (requests,), generator=generator),
        total,
        width,
    )
    return {
        "rows": rows,
        "tables": step.Tables(token_slot, window_slot),
        "bounds": step.Bounds(128, max_pages=pages, max_c128=pages * 2, page=PAGE),
        "rings": step.Rings(16, 136),
        "store_all": True,
    }


@pytest.mark.parametrize("seed", range(20))
def test_step_meta(device, seed):
    for width, total, store_all in ((V, 8 * V, True), (None, 50, True), (None, 48, False)):
        arguments = {**step_problem(total, width, seed=seed), "store_all": store_all}
        want = step_reference.step_meta(**arguments)
        assert_equal(step.step_meta(**to(device, arguments)), want)


def test_prefill_step_meta(device):
    arguments = {**step_problem(3500, None, requests=2), "store_all": False}
    first, lengths = torch.tensor([131, 0]), torch.tensor([2000, 1500])
    arguments["rows"] = arguments["rows"]._replace(committed=first, run=lengths)
    want = step_reference.step_meta(**arguments)
    assert_equal(step.step_meta(**to(device, arguments)), want)


def test_draft_meta(device):
    problem = step_problem()
    request_slot, committed = problem["rows"][:2]
    request_slot[3] = -1
    rows = step.BlockRows(request_slot, committed, torch.arange(8) * 200, GAMMA)
    arguments = {"rows": rows, "tables": problem["tables"], "window": 128}
    want = step_reference.draft_meta(**arguments)
    assert_equal(step.draft_meta(**to(device, arguments)), want)


def test_step_meta_graph_replays_with_fewer_requests(device):
    arguments = to(device, step_problem())
    graph, output = captured(lambda: step.step_meta(**arguments))
    fewer = step_problem(seed=5)
    fewer["rows"].request_slot[3:] = -1
    fewer["rows"].run[3:] = 0
    for name in ("rows", "tables"):
        for value, other in zip(arguments[name], fewer[name], strict=True):
            if isinstance(value, torch.Tensor):
                value.copy_(other)
    graph.replay()
    assert_equal(output, step_reference.step_meta(**fewer))


# --- draft --------------------------------------------------------------------------------------


def draft_problem(requests, device, vocab=VOCAB // 8):
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    return {
        "base": randn(requests, GAMMA, vocab) * 4,
        "prev": torch.randint(0, vocab, (requests,), generator=generator, device=device),
        "w1": randn(vocab, RANK).bfloat16(),
        "w2": prepare_bf16((randn(vocab, RANK) / 16).bfloat16()),
    }


def draft_sampling(requests, device):
    return draft.DraftSampling(
        temperature=(torch.arange(requests, device=device) % 3) * 0.6,
        seeded=torch.arange(requests, device=device) % 2 == 0,
        seed=torch.arange(requests, device=device) * 7919,
        committed=torch.arange(requests, device=device) + 100,
    )


@pytest.mark.parametrize("requests", [1, 3, 8, 17])
@pytest.mark.parametrize("mixed", [False, True])
def test_markov_block(device, requests, mixed):
    problem = draft_problem(requests, device)
    sampling = draft_sampling(requests, device) if mixed else None
    got = draft.markov_block(**problem, sampling=sampling)
    again = draft.markov_block(**problem, sampling=sampling)
    assert_equal(again, got)
    # The chain of the kernel's own tokens, so that a near tie at step k does not spread.
    prev = problem["prev"]
    for k in range(GAMMA):
        bias = problem["w1"][prev].double() @ problem["w2"].weight.double().T
        want = problem["base"][:, k].double() + bias
        torch.testing.assert_close(got.logits[:, k].double(), want, rtol=1e-5, atol=1e-5)
        if not mixed:
            assert torch.equal(got.tokens[:, k], got.logits[:, k].argmax(-1))
        prev = got.tokens[:, k]


def test_markov_rows_do_not_depend_on_the_batch(device):
    problem, sampling = draft_problem(20, device), draft_sampling(20, device)
    whole = draft.markov_block(**problem, sampling=sampling)
    for rows in ([4], [19, 0, 7], list(range(19, -1, -1))):
        part = draft.markov_block(
            problem["base"][rows],
            problem["prev"][rows],
            problem["w1"],
            problem["w2"],
            sampling=draft.DraftSampling(*(value[rows] for value in sampling)),
        )
        assert torch.equal(part.tokens, whole.tokens[rows])
        assert torch.equal(part.logits, whole.logits[rows])


def test_confidence(device):
    generator = torch.Generator().manual_seed(2)
    arguments = (
        torch.randn(8, GAMMA, 4096, generator=generator).bfloat16(),
        torch.randint(0, 1000, (8, GAMMA), generator=generator),
        torch.randn(1000, RANK, generator=generator).bfloat16(),
        torch.randn(4096 + RANK, generator=generator) / 64,
        torch.rand(GAMMA, generator=generator) + 0.5,
    )
    on_device = [a.to(device) for a in arguments]
    got, want = draft.confidence(*on_device), draft_reference.confidence(*arguments)
    torch.testing.assert_close(got.logit.cpu(), want.logit, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.probability.cpu(), want.probability, rtol=1e-5, atol=1e-6)
    alone = draft.confidence(on_device[0][3:4], on_device[1][3:4], *on_device[2:])
    assert torch.equal(alone.logit[0], got.logit[3])


# --- schedule -----------------------------------------------------------------------------------


def test_schedule_against_the_sort(device):
    generator = random.Random(3)
    palettes = [[0.0, 0.5, 1.0], [0.9, 1.0], [0.25, 0.5, float("nan")], None]
    for case in range(400):
        requests, gamma = generator.choice([1, 2, 3, 8, 33, 64]), generator.randint(1, 7)
        palette = palettes[case % 4]
        confidence = torch.tensor(
            [
                generator.random() if palette is None else generator.choice(palette)
                for _ in range(requests * gamma)
            ]
        ).view(requests, gamma)
        full = requests * gamma
        bounds = {"eps": 1e-6, "min_len": 1, "max_len": generator.randint(1, gamma + 1)}
        real = torch.tensor([generator.choice([requests, requests // 2])], dtype=torch.int32)
        for budget in (-1, 0, 1, full // 2, full - 1, full):
            b = torch.tensor([budget], dtype=torch.int32)
            want = schedule_reference.schedule(confidence, b, **bounds, num_real=real)
            got = schedule.schedule(
                confidence.to(device), b.to(device), **bounds, num_real=real.to(device)
            )
            assert torch.equal(got.cpu(), want), (case, budget)


def test_one_schedule_graph_serves_every_budget_and_batch(device):
    confidence = torch.rand(64, GAMMA, generator=torch.Generator().manual_seed(4)).to(device)
    budget = torch.tensor([7], dtype=torch.int32, device=device)
    real = torch.tensor([64], dtype=torch.int32, device=device)
    graph, output = captured(lambda: schedule.schedule(confidence, budget, num_real=real))
    for b, n in ((0, 64), (13, 64), (320, 64), (9, 3), (15, 3), (40, 8)):
        budget.fill_(b)
        real.fill_(n)
        confidence[n:] = torch.nan
        graph.replay()
        want = schedule_reference.schedule(
            confidence.cpu(), budget.cpu(), eps=1e-6, min_len=1, max_len=6, num_real=real.cpu()
        )
        assert torch.equal(output.cpu(), want), (b, n)
        confidence.copy_(torch.rand(64, GAMMA, generator=torch.Generator().manual_seed(b)))


# --- accept -------------------------------------------------------------------------------------


def accept_problem(requests, vocab=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, V, vocab, generator=generator) * 3
    draft_logits = logits[:, :-1] + torch.randn(requests, GAMMA, vocab, generator=generator)
    candidates = torch.cat(
        [torch.zeros(requests, 1, dtype=torch.int64), logits[:, :-1].argmax(-1)], 1
    )
    wrong = torch.rand(requests, GAMMA, generator=generator) < 0.2
    candidates[:, 1:][wrong] = 7
    lengths = {
        "acceptable": torch.randint(1, V + 1, (requests,), generator=generator).int(),
        "committed": torch.arange(requests) * 10,
    }
    return candidates, logits.flatten(0, 1), draft_logits, lengths


@pytest.mark.parametrize("requests", [1, 8])
def test_accept_greedy(device, requests):
    candidates, logits, _, lengths = accept_problem(requests)
    want = accept_reference.accept_greedy(candidates, logits, **lengths)
    got = accept.accept_greedy(candidates.to(device), logits.to(device), **to(device, lengths))
    assert_equal(got, want)


def test_accept_sampled_has_the_exact_law(device, goodness):
    """100,000 requests, 16 tokens: chi-square of the first token against the target."""
    n, vocab = 100_000, 16
    generator = torch.Generator().manual_seed(6)
    p_logits, q_logits = torch.randn(2, vocab, generator=generator)
    for certain in (False, True):
        candidates = torch.zeros(n, 2, dtype=torch.int64, device=device)
        if not certain:
            q = q_logits.softmax(-1).to(device)
            candidates[:, 1] = torch.multinomial(q.expand(n, -1), 1)[:, 0]
        got = accept.accept_sampled(
            candidates,
            p_logits.to(device).expand(2 * n, -1).contiguous(),
            None if certain else q_logits.to(device).expand(n, 1, -1).contiguous(),
            acceptable=torch.full((n,), 2, dtype=torch.int32, device=device),
            committed=torch.zeros(n, dtype=torch.int64, device=device),
            temperature=torch.ones(n, device=device),
            seed=torch.arange(n, device=device),
        )
        tail, distance = goodness(got.tokens[:, 0].cpu(), p_logits.softmax(-1))
        assert tail > 1e-3
        assert distance < 0.01


def test_accept_sampled_rows_do_not_depend_on_the_batch(device):
    candidates, logits, draft_logits, lengths = to(device, accept_problem(8))
    keys = {
        **lengths,
        "temperature": torch.linspace(0.5, 1.5, 8, device=device),
        "seed": torch.arange(8, device=device),
    }
    whole = accept.accept_sampled(candidates, logits, draft_logits, **keys)
    assert_equal(accept.accept_sampled(candidates, logits, draft_logits, **keys), whole)
    for rows in ([3], [7, 0, 2]):
        part = accept.accept_sampled(
            candidates[rows],
            logits.view(8, V, -1)[rows].flatten(0, 1),
            draft_logits[rows],
            **{name: value[rows] for name, value in keys.items()},
        )
        for name, a, b in zip(whole._fields, part, whole, strict=True):
            assert torch.equal(a, b[rows]), name


# --- collective, state --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ordered_sum(device, dtype):
    gathered = torch.randn(8, 48, 4096, generator=torch.Generator().manual_seed(7)).to(dtype)
    want = collective_reference.ordered_sum(gathered)
    assert torch.equal(collective.ordered_sum(gathered.to(device)).cpu(), want)


def test_rollback_in_a_pool_beyond_two_to_the_31(device):
    """20 layers x 768 slots x 136 rows x 1024: 2.1e9 elements, 8.6 GB."""
    ring, slots, layers = 136, 792, 20
    pool = torch.ones(layers, slots * ring, 1024, device=device)
    assert pool.numel() > 2**31
    lengths = {
        "request_slot": torch.tensor([slots - 1, -1, 5]),
        "committed": torch.tensor([134, 3, 1_000_000]),
        "commit_len": torch.tensor([2, 1, 6], dtype=torch.int32),
        "rows_run": torch.tensor([6, 6, 6], dtype=torch.int32),
    }
    state.c128_rollback(pool, **to(device, lengths), ring=ring, verify_width=V)
    want = torch.ones(1, slots * ring, 8)
    state_reference.c128_rollback(want, **lengths, ring=ring, verify_width=V)
    for layer in range(layers):
        assert torch.equal(pool[layer, :, :4].cpu(), want[0, :, :4])
        assert torch.equal(pool[layer, :, -4:].cpu(), want[0, :, -4:])
    rows = (pool[-1] != 1).all(1).nonzero().flatten().cpu()
    assert rows.numel() == 4
    half = torch.tensor([0.0, -torch.inf], device=device).repeat_interleave(512)
    assert (pool[:, rows.to(device)] == half).all()


def test_clears(device):
    generator = torch.Generator().manual_seed(8)
    attention = torch.randn(21, 40 * 16, 2048, generator=generator)
    indexer = torch.randn(21, 40 * 16, 512, generator=generator)
    pages = torch.tensor([39, -1, 0, 7, 7])
    pools = [attention.to(device), indexer.to(device)]
    state.clear_pages(pools, pages.to(device), ring=16)
    state_reference.clear_blocks([attention, indexer], pages, ring=16)
    assert torch.equal(pools[0].cpu(), attention)
    assert torch.equal(pools[1].cpu(), indexer)


def test_rollback_graph_replays_with_other_lengths(device):
    pool = torch.ones(20, 9 * 136, 1024, device=device)
    lengths = to(
        device,
        {
            "request_slot": torch.arange(1, 9),
            "committed": torch.arange(8) * 20,
            "commit_len": torch.ones(8, dtype=torch.int32),
            "rows_run": torch.full((8,), V, dtype=torch.int32),
        },
    )
    graph, _ = captured(lambda: state.c128_rollback(pool, **lengths, ring=136, verify_width=V))
    pool.fill_(1.0)
    lengths["request_slot"][2:] = -1
    lengths["commit_len"].fill_(4)
    want = pool.cpu()
    graph.replay()
    state_reference.c128_rollback(want, **to("cpu", lengths), ring=136, verify_width=V)
    assert torch.equal(pool.cpu(), want)


# --- launch budget ------------------------------------------------------------------------------


def test_launches_of_one_control_step(device):
    """Schedule, greedy accept and rollback: one, two and one launches; metadata one each."""
    candidates, logits, _, lengths = to(device, accept_problem(8, vocab=16_384))
    pool = torch.ones(20, 9 * 136, 1024, device=device)
    step_arguments = to(device, step_problem())
    budget = torch.tensor([7], dtype=torch.int32, device=device)
    slots = torch.arange(1, 9, device=device)

    def control_step():
        schedule.schedule(torch.rand(8, GAMMA, device=device), budget)
        step.step_meta(**step_arguments)
        result = accept.accept_greedy(candidates, logits, **lengths)
        state.c128_rollback(
            pool,
            slots,
            lengths["committed"],
            result.commit_len,
            lengths["acceptable"],
            ring=136,
            verify_width=V,
        )

    control_step()
    with count_launches() as counts:
        control_step()
    assert counts == {
        "_schedule": 1,
        "_step_meta": 1,
        "_row_best_kernel": 1,
        "_report": 1,
        "_rollback": 1,
    }


def test_launches_of_a_markov_block(device):
    problem = draft_problem(8, device)
    draft.markov_block(**problem)
    with count_launches() as counts:
        draft.markov_block(**problem)
    assert counts == {"_markov_step": GAMMA, "_winner": 1}
