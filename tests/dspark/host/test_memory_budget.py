"""What a card holds: the budget before anything is loaded, and the flags that follow from it."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.host import memory_budget as mb
from dspark.host.memory_budget import GIB, MIB, BudgetError, Card, Load, Weights, Wishes
from dspark.host.pool_sizes import WINDOW_PAGES_PER_SLOT, window_pages
from dspark.kernels.common.kv_pages import page_stride
from dspark.target.caches import PAGE_TOKENS
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

RANK = ModelConfig.from_hf(presets.full_rank())  # one of eight ranks, as a model of its own
TINY = ModelConfig.from_hf(presets.tiny())
CARD = Card(int(23.4 * GIB))


def load(verify_width=6, config=RANK, **changed) -> Load:
    plain = Load(config, 1, verify_width, 8, 8192, 2048, 0.05, graphs=True)
    return plain._replace(**changed)


@pytest.fixture(scope="module")
def weights() -> dict[int, Weights]:
    """By verify rows."""
    return {rows: mb.checkpoint_weights(RANK, 1, draft=rows > 1) for rows in (1, 6)}


def test_weights_are_what_the_checkpoint_holds(weights, tiny_checkpoint):
    files = sum(shard.stat().st_size for shard in tiny_checkpoint.glob("*.safetensors"))
    tiny = sum(mb.checkpoint_weights(TINY, 1, draft=True))
    assert 0.97 * files < tiny < files  # the headers are the difference
    assert weights[6].target / GIB == pytest.approx(19.22, abs=0.01)
    assert weights[6].draft / GIB == pytest.approx(1.33, abs=0.01)
    assert weights[1] == Weights(weights[6].target, 0)


def test_ranks_share_the_experts():
    one, two = (mb.checkpoint_weights(TINY, ranks, draft=False).target for ranks in (1, 2))
    experts = TINY.num_hidden_layers * TINY.n_routed_experts
    expert = 3 * TINY.hidden_size * TINY.moe_intermediate_size * 17 // 32  # with its scales
    assert one - two >= experts * expert // 2


def test_pools_are_the_sizes_of_the_pools():
    found = mb.budget(load(), Weights(0, 0), pages=100)
    c4_page, c128_page = page_stride(64) + 64 * 132, page_stride(2)
    assert found.entries == 101 * (21 * c4_page + 20 * c128_page)
    assert found.rings == 9 * 20 * 136 * 1024 * 4
    latents, rows = 46 * page_stride(256), 21 * 16 * (2048 + 512) * 4
    assert found.window == (4 * 8 + 8 + 1 + 1) * (latents + rows)
    assert found.rope == 2 * (8192 + 256) * 64 * 4
    assert found.total == sum(found) - found.tokens


def test_what_a_24_gb_card_holds(weights):
    """Eight requests; at least 128,000 tokens with drafts, 300,000 without."""
    for rows, least in ((6, 128_000), (1, 300_000)):
        found = mb.plan(CARD, weights[rows], load(rows), Wishes())
        assert found.load.requests == 8
        assert found.tokens >= least
        assert 0.97 * found.tokens <= found.load.context <= found.tokens


@pytest.mark.parametrize("rows", [1, 6])
def test_the_documented_sizes_fit_a_24_gb_card(weights, rows):
    card = CARD._replace(static_share=0.92)
    wishes = Wishes(requests=8, context=8192, prompt_rows=8192, tokens=8192)
    found = mb.plan(card, weights[rows], load(rows, window_ratio=1.0), wishes)
    assert found.tokens == 8192
    assert found.load[3:6] == (8, 8192, 8192)
    assert card.tokens(found.load, weights[rows]) >= 8192


def test_ranks_leave_room_for_nccl():
    one, two = (mb.budget(load(tp=tp), Weights(0, 0), 10).reserve for tp in (1, 2))
    assert (one, two) == (300 * MIB, 600 * MIB)


@pytest.mark.parametrize(
    ("free", "wishes", "said"),
    [
        (2 * GIB, Wishes(), "needs 21.60 GiB on each card (weights 19.22 GiB, draft 1.33 GiB"),
        (2 * GIB, Wishes(), "2.00 GiB are free; free memory or divide the model by more cards"),
        (CARD.free, Wishes(requests=500), "--max-running-requests 500 needs"),
        (CARD.free, Wishes(context=1 << 20), "--context-length 1048576 needs"),
        (CARD.free, Wishes(tokens=4 << 20), "--max-total-tokens 4194304 needs"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(weights, free, wishes, said):
    with pytest.raises(BudgetError) as refused:
        mb.plan(Card(free), weights[6], load(), wishes)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("wishes", "flag"),
    [
        (Wishes(requests=500), "--max-running-requests"),
        (Wishes(context=1 << 20), "--context-length"),
        (Wishes(tokens=4 << 20), "--max-total-tokens"),
    ],
)
def test_the_numbers_of_a_refusal_fit(weights, wishes, flag):
    with pytest.raises(BudgetError) as refused:
        mb.plan(CARD, weights[6], load(), wishes)
    number = int(str(refused.value).split("free; ")[1].split(f"{flag} ")[1].split()[0])
    field = {"--max-running-requests": "requests", "--context-length": "context"}.get(
        flag, "tokens"
    )
    found = mb.plan(CARD, weights[6], load(), Wishes(**{field: number}))
    assert number in (found.load.requests, found.load.context, found.tokens)


def test_a_share_for_weights_and_pools_is_kept(weights):
    card = CARD._replace(static_share=0.92)
    found = mb.plan(card, weights[6], load(), Wishes())
    held = mb.budget(found.load, weights[6], found.tokens // PAGE_TOKENS)
    assert held.weights + held.draft + held.pools <= 0.92 * card.free
    assert found.tokens < mb.plan(CARD, weights[6], load(), Wishes()).tokens
    with pytest.raises(BudgetError, match=r"--mem-fraction-static 0\.85 gives 19\.89 GiB"):
        mb.plan(CARD._replace(static_share=0.85), weights[6], load(), Wishes())


def test_large_cards_serve_more_requests_once_the_context_is_whole(weights):
    found = mb.plan(Card(139 * GIB), weights[6], load(), Wishes())
    assert found.load.context == RANK.max_position_embeddings
    assert found.load.requests == mb.MOST_REQUESTS
    given = mb.plan(Card(139 * GIB), weights[6], load(), Wishes(requests=8))
    assert given.load.requests == 8


@given(
    free=st.integers(22 * GIB, 80 * GIB),
    rows=st.sampled_from([1, 6]),
    requests=st.none() | st.integers(1, 16),
    context=st.none() | st.integers(512, 65536),
    tokens=st.none() | st.integers(2, 400).map(lambda pages: pages * PAGE_TOKENS),
    chunk=st.none() | st.integers(1, 16).map(lambda pages: pages * PAGE_TOKENS),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_fits_and_honours_what_was_given(
    weights, free, rows, requests, context, tokens, chunk
):
    card, wishes = Card(free), Wishes(requests, context, chunk, tokens)
    try:
        found = mb.plan(card, weights[rows], load(rows), wishes)
    except BudgetError:
        return
    for given_value, chosen in zip(
        wishes,
        (found.load.requests, found.load.context, found.load.prompt_rows, found.tokens),
        strict=True,
    ):
        assert given_value in (None, chosen)
    # What is given may count on the least that CUDA takes, what is chosen never does.
    assert card.tokens(found.load, weights[rows]) >= found.tokens


def test_tokens_are_the_most_that_fit(weights):
    one, available = load(), CARD.available
    pages = mb.most_pages(one, weights[6], available)
    assert mb.budget(one, weights[6], pages).total <= available
    assert mb.budget(one, weights[6], pages + 1).total > available


def test_what_gives_more_does(weights):
    available = CARD.available
    before = PAGE_TOKENS * mb.most_pages(load(), weights[6], available)
    more = mb.what_gives_more(load(), weights[6], available, None)
    assert len(more) == 3
    for line in more:
        assert int(line.split(": ")[1].split()[0].replace(",", "")) > before


def test_the_table_names_every_line(weights):
    found = mb.budget(load(), weights[6], 100)
    text = mb.table(found, load(), ["--context-length 4096: 9 tokens"])
    first, *lines = text.splitlines()
    assert first.startswith("Memory of each card: 25,600 tokens, 8 requests, context 8,192")
    names = [line.split()[0] for line in lines]
    assert names == [*mb.Budget._fields[1:], "all", "more"]


def test_the_window_pool_serves_requests_and_a_chunk():
    assert window_pages(10_000, 8, 2048, 0.0) == WINDOW_PAGES_PER_SLOT * 8 + 8 + 1
    assert window_pages(10_000, 8, 2048, 0.1) == 1000
    assert window_pages(20, 8, 2048, 1.0) == 20


def test_bounds_are_those_of_the_kernels():
    triton = pytest.importorskip("triton")
    assert triton
    from dspark.kernels.attention import kernel as attention
    from dspark.kernels.indexer import kernel as indexer
    from dspark.kernels.moe import kernel as moe

    assert indexer.LOGITS_BYTES == mb.INDEX_SCORES
    assert moe.PREFILL_SLOTS_BYTES == mb.EXPERT_SLOTS
    assert attention.REPEATED_SLOTS == mb.REPEATED_SLOTS
    assert attention.DECODE_ROWS == mb.DECODE_ROWS
    assert attention.LAUNCH["decode"].constexprs["CH"] == mb.SPLIT_KEYS


def test_captured_sizes_end_with_the_largest():
    assert mb.graph_sizes(8) == [1, 2, 4, 8]
    assert mb.graph_sizes(3) == [1, 2, 3]
    assert mb.graph_sizes(1) == [1]
    assert mb.graph_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_no_draft_no_stages():
    without = dataclasses.replace(RANK, dspark=None)
    assert load(1, without).stages == 0
    assert load(1).captured == 0
    assert load(6).captured == 3
