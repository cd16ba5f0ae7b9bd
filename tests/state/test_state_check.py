"""check() names the place of every kind of violation; debug mode sees reads before they happen."""

import pytest
import torch

from dspark.kernels.step import BatchRows, Bounds, Rings, Tables, step_meta
from dspark.state import StateGeometry, StateInvariantError, StateLifecycle, check

SIZES = StateGeometry.for_model(
    slots=4, window_pages=6, verify_width=6, c4_layers=2, c128_layers=3, head_dim=2, index_dim=1
)
C4, C128 = SIZES.c4.ring, SIZES.c128.ring


class FreeLists:
    """The free window pages and request slots that the check compares with."""

    def __init__(self):
        self.num_pages = SIZES.window_pages
        self.free_pages = torch.arange(1, self.num_pages + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64)
        self.free_slots = list(range(1, SIZES.slots + 1))


def attached(debug=False):
    state, lists = StateLifecycle(SIZES, "cpu", debug=debug), FreeLists()
    state.pages.allocator = state.slots.lists = lists
    return state, lists


def test_fresh_state_passes():
    state, _ = attached(debug=True)
    state.check()


@pytest.mark.parametrize(
    ("kind", "layer", "row", "value", "message"),
    [
        ("c4", 1, 3, 1.0, "c4 layer 1 page 0 row 3 is padding"),
        ("c128", 2, C128 - 1, 1.0, "c128 layer 2 slot 0 row 135 is padding"),
        ("idx", 1, 5 * C4 + 15, torch.nan, "idx layer 1 page 5 row 15 is neither empty nor finite"),
        (
            "c128",
            0,
            3 * C128 + 7,
            torch.inf,
            "c128 layer 0 slot 3 generation 1 row 7 is neither empty nor finite",
        ),
        ("idx", 0, 2 * C4, 1.0, "idx layer 0 page 2 row 0 belongs to a free page"),
    ],
)
def test_bad_rows_are_named(kind, layer, row, value, message):
    state, lists = attached()
    lists.free_slots.remove(3)
    state.slots.assigned([3])
    state.pools.tensors[kind][layer, row] = value
    with pytest.raises(StateInvariantError, match=message):
        state.check()


def test_a_torn_row_is_found():
    state, _ = attached()
    state.pools.tensors["c4"][0, 2 * C4, :4] = 1.0  # kv written, score not
    with pytest.raises(StateInvariantError, match="c4 layer 0 page 2 row 0 is neither"):
        state.check()


def test_a_released_page_may_be_dirty_until_the_next_forward():
    state, lists = attached()
    lists.free_pages = lists.free_pages[1:]
    state.pools.tensors["c4"][:, C4 : 2 * C4] = 1.0
    state.check()
    state.pages.release(torch.tensor([1]))
    lists.free_pages = torch.cat([torch.tensor([1]), lists.free_pages])
    state.check()
    state.begin_forward()
    state.check()
    state.pools.tensors["c4"][1, C4] = 1.0  # somebody who does not own the page
    with pytest.raises(StateInvariantError, match="c4 layer 1 page 1 row 0 belongs to a free page"):
        state.check()


def test_free_lists_are_checked():
    state, lists = attached()
    lists.free_slots.remove(2)
    with pytest.raises(StateInvariantError, match="slot 2 generation 0 is not held and 0 times"):
        state.check()
    state.slots.assigned([2])
    state.check()
    lists.free_slots.append(2)
    with pytest.raises(StateInvariantError, match="slot 2 generation 1 is held and 1 times"):
        state.check()
    lists.free_slots.remove(2)
    lists.free_pages = torch.tensor([1, 2, 2, 3])
    with pytest.raises(StateInvariantError, match="page 2 is 2 times in the free list"):
        state.check()
    lists.free_pages = torch.tensor([0, 1])
    with pytest.raises(StateInvariantError, match=r"not one of 1\.\.6"):
        state.check()


def test_a_generation_that_went_back_is_named():
    state, _ = attached()
    state.slots.reset()
    state.check()
    state.slots.generation[3] = 0
    with pytest.raises(StateInvariantError, match="slot 3 went back from generation 1 to 0"):
        state.check()


def plan(prefix, length, slot=3, pages=(5, 2, 4)):
    """A verify of `length` rows from `prefix` on; window page k of the request is pages[k]."""
    token_table = torch.zeros(SIZES.slots + 1, 768, dtype=torch.int32)
    pos = torch.arange(768)
    token_table[slot] = torch.tensor(pages)[pos // 256] * 256 + pos % 256
    return step_meta(
        BatchRows(torch.tensor([slot]), torch.tensor([prefix]), torch.tensor([length]), length + 1),
        Tables(token_table, torch.arange(2048)),
        Bounds(128, 3, 6),
        Rings(C4, C128),
        store_all=True,
    )


def forward(state, prefix, length, **where):
    """Plan, check and store rows, as a real forward does."""
    meta = plan(prefix, length, **where)
    state.begin_forward()
    state.observe(meta, torch.tensor([where.get("slot", 3)]))
    for kind, store in (("c4", meta.c4_store), ("idx", meta.c4_store), ("c128", meta.c128_store)):
        state.pools.tensors[kind][:, store[store >= 0].long()] = 1.0


@pytest.fixture
def running():
    """Slot 3 at length 126 in pages 5, 2, 4 with every row stored."""
    state = StateLifecycle(SIZES, "cpu", debug=True)
    state.slots.assigned([3])
    forward(state, 0, 126)
    return state


def verify(state, prefix, commit, told=None):
    forward(state, prefix, 6)
    one = [torch.tensor([n]) for n in (3, prefix, told or commit, 6)]
    state.rollback.after_verify(*one)


@pytest.mark.parametrize("commit", range(1, 7))
def test_steps_pass_for_every_commit(running, commit):
    for step in range(30):
        verify(running, 126 + step * commit, commit)
    running.check()


@pytest.mark.parametrize("commit", range(2, 7))
def test_rollback_fed_accepted_drafts_is_refused_at_the_next_step(running, commit):
    verify(running, 126, 6)
    verify(running, 132, commit, told=commit - 1)
    message = rf"(position|offset) {132 + commit - 1}\b.*holds (nothing|a rejected draft)"
    with pytest.raises(StateInvariantError, match=message):
        verify(running, 132 + commit, 1)


def test_rollback_called_twice_changes_nothing(running):
    verify(running, 126, 6)
    verify(running, 132, 3)
    before = {kind: rows.clone() for kind, rows in running.pools.tensors.items()}
    one = [torch.tensor([n]) for n in (3, 132, 3, 6)]
    running.rollback.after_verify(*one)
    for kind, rows in running.pools.tensors.items():
        assert torch.equal(rows, before[kind])
    verify(running, 135, 2)


def test_reading_a_rejected_draft_is_refused(running):
    verify(running, 126, 1)
    message = "row 15 of page 5 epoch 0 is needed for page offset 127.* a rejected draft"
    with pytest.raises(StateInvariantError, match=message):
        verify(running, 129, 1)  # nobody ran 127 and 128 again


def test_reading_an_earlier_owner_is_refused(running):
    running.slots.released([3])
    running.slots.assigned([3])
    message = "c128 row of slot 3 generation 2 position 0 is needed, but .* generation 1 position 0"
    with pytest.raises(StateInvariantError, match=message):
        running.observe(plan(126, 6), torch.tensor([3]))


def test_reading_a_released_page_is_refused(running):
    running.pages.release(torch.tensor([5]))
    message = "c4 row 8 of page 5 epoch 1 is needed for page offset 120.* epoch 0 position 120"
    with pytest.raises(StateInvariantError, match=message):
        running.observe(plan(126, 6), torch.tensor([3]))


def test_a_row_lost_in_one_layer_is_named(running):
    running.pools.tensors["idx"][1, 5 * C4 + 13, :2] = 0
    running.pools.tensors["idx"][1, 5 * C4 + 13, 2:] = -torch.inf
    message = "idx layer 1 page 5 row 13 was stored at position 125 but is empty"
    with pytest.raises(StateInvariantError, match=message):
        running.check()


def test_a_row_written_by_nobody_is_named(running):
    running.pools.tensors["c128"][2, 3 * C128 + 127] = 1.0
    message = "c128 layer 2 slot 3 generation 1 row 127 was written by nobody but is not empty"
    with pytest.raises(StateInvariantError, match=message):
        running.check()


def test_loaded_pages_count_as_written():
    state = StateLifecycle(SIZES, "cpu", debug=True)
    state.slots.assigned([3])
    for kind in ("c4", "idx"):
        state.pools.tensors[kind][:, 5 * C4 : 6 * C4] = 1.0
    state.tags.loaded(torch.tensor([5]))
    forward(state, 256, 6)
    state.check()


@pytest.mark.parametrize("row", [0, 1, C128, 5 * C128 - 1])
def test_rings_are_read_in_bands(monkeypatch, row):
    """One row a band: every row is still looked at, and named by its number in the layer."""
    monkeypatch.setattr(check, "BAND_BYTES", 1)
    state, _ = attached()
    assert all(len(band.rows) == 1 for band in check.bands(state.pools))
    state.pools.tensors["c128"][1, row] = torch.inf
    slot, offset = divmod(row, C128)
    message = f"c128 layer 1 slot {slot} .*row {offset} is neither"
    with pytest.raises(StateInvariantError, match=message):
        check.check_rows_whole(state.pools, state.slots)


def test_bands_cover_every_row_once():
    state, _ = attached()
    for kind in ("c4", "idx", "c128"):
        rows = [b.rows for b in check.bands(state.pools, (kind,))]
        assert torch.equal(torch.cat(rows), state.pools.tensors[kind].flatten(0, 1))


def test_an_idle_server_reads_no_ring(caplog):
    state, lists = attached()
    state.begin_forward()
    state.pools.tensors = {}
    state.check_when_idle()
    assert caplog.text == ""
    lists.free_slots.append(2)
    state._checked = False
    state.check_when_idle()
    assert "slot 2 generation 0 is not held and 2 times in the free list" in caplog.text


def test_a_check_without_memory_is_one_sentence(monkeypatch, caplog):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("Tried to allocate 8.30 GiB")

    monkeypatch.setattr(check, "check_rows_whole", out_of_memory)
    state, _ = attached(debug=True)
    state.begin_forward()
    state.check_when_idle()
    said = "State check left out, there is not enough memory for it: Tried to allocate 8.30 GiB"
    assert [record.message for record in caplog.records] == [said, said]


def test_rings_are_fp32_whatever_the_default(restore_default_dtype):
    torch.set_default_dtype(torch.bfloat16)
    state = StateLifecycle(SIZES, "cpu")
    assert {rows.dtype for rows in state.pools.tensors.values()} == {torch.float32}


@pytest.fixture
def restore_default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
