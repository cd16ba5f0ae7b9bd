"""The life cycle under the real planner and the real compressors, byte for byte."""

import pytest
import torch
from compressor_run import Memory, Rows, entries, forward, random_rows, weights

from dspark.kernels.common.kv_pages import page_stride
from dspark.state import StateGeometry, StateLifecycle

TRUE, WRONG = random_rows(1), random_rows(2)
WEIGHTS = weights()
SLOT, PAGES = 2, [3, 1, 2]


def fresh(verify_width: int) -> tuple[StateLifecycle, Memory]:
    sizes = StateGeometry.for_model(
        slots=3, window_pages=4, verify_width=verify_width, c4_layers=1, c128_layers=1
    )
    state = StateLifecycle(sizes, "cpu")
    memory = Memory(
        window=torch.zeros(5, page_stride(256), dtype=torch.uint8),
        c4=torch.zeros(5, page_stride(64), dtype=torch.uint8),
        keys=torch.zeros(5, 64 * 132, dtype=torch.uint8),
        c128=torch.zeros(5, page_stride(2), dtype=torch.uint8),
        c4_ring=state.pools.layer("c4", 0),
        keys_ring=state.pools.layer("idx", 0),
        c128_ring=state.pools.layer("c128", 0),
        ring_c4=sizes.c4.ring,
        ring_c128=sizes.c128.ring,
        window_table=torch.arange(5 * 256),
    )
    return state, memory


def bf16(rows: Rows) -> Rows:
    return Rows(*(values.bfloat16().float() for values in rows))


def speculate(
    start: int,
    end: int,
    commits: list[int],
    *,
    bf16_rows: bool = False,
    bf16_ring: bool = False,
    plain: bool = False,
) -> Memory:
    """Prefill `start` tokens, then verify six rows a step until `end` tokens are committed.

    bf16_rows rounds rows before anything sees them, bf16_ring only what the rings keep; plain
    keeps C4 entries in fp32 instead of fp8.
    """
    state, memory = fresh(6)
    if plain:
        memory = memory._replace(c4=torch.zeros(5, 64 * 512))

    def run(position, rows, store_all):
        rows = bf16(rows) if bf16_rows else rows
        forward(memory, WEIGHTS, SLOT, PAGES, position, rows, store_all)
        if bf16_ring:
            for pool in state.pools.tensors.values():
                pool.copy_(pool.bfloat16())

    run(0, TRUE.at(0, start), store_all=False)
    length, step = start, 0
    while length < end:
        commit = min(commits[step % len(commits)], end - length)
        drafts = WRONG.at(length + commit, 6 - commit)
        run(length, TRUE.at(length, commit).joined(drafts), store_all=True)
        one = [torch.tensor([n]) for n in (SLOT, length, commit, 6)]
        state.rollback.after_verify(*one)
        length, step = length + commit, step + 1
    return memory


def decode(start: int, end: int) -> Memory:
    """The same tokens without drafts: prefill, then one row a step in the smaller rings."""
    _, memory = fresh(1)
    forward(memory, WEIGHTS, SLOT, PAGES, 0, TRUE.at(0, start), store_all=False)
    for position in range(start, end):
        forward(memory, WEIGHTS, SLOT, PAGES, position, TRUE.at(position, 1), store_all=True)
    return memory


@pytest.mark.parametrize("start", [1, 122, 126, 250, 509])
@pytest.mark.parametrize("commits", [[1], [6], [2, 5, 1, 4]], ids=str)
def test_I01_entries_equal_a_run_without_drafts(start, commits):
    end = start + 24
    expected = entries(decode(start, end), PAGES, end)
    got = entries(speculate(start, end, commits), PAGES, end)
    for kind, slots in expected.items():
        if "scales" not in kind:
            assert torch.equal(got[kind], slots), kind


def test_bf16_rows():
    """Rows rounded to bf16 make close entries, and drafts still change nothing."""
    start, end = 122, 152
    one, other = (speculate(start, end, c, bf16_rows=True) for c in ([1], [2, 5, 1, 4]))
    assert torch.equal(entries(one, PAGES, end)["c4"], entries(other, PAGES, end)["c4"])
    exact, rounded = (speculate(start, end, [1], plain=True, bf16_rows=b).c4 for b in (False, True))
    assert 0 < (rounded - exact).norm() / exact.norm() < 1e-2


def test_bf16_rings_alone_make_entries_depend_on_the_drafts():
    """A window then mixes fp32 rows of its own step with rounded older ones: rings are fp32."""
    start, end = 122, 152
    one, other = (speculate(start, end, c, bf16_ring=True) for c in ([1], [2, 5, 1, 4]))
    assert (one.c128_ring[0, 512:] == -torch.inf).all(), "the empty score survives"
    assert not torch.equal(entries(one, PAGES, end)["c4"], entries(other, PAGES, end)["c4"])
