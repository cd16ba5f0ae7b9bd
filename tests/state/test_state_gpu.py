"""The life cycle on a GPU: streams, fences, graphs and no waiting for the device."""

import pytest
import torch

from dspark.state import PageError, StateGeometry, StateLifecycle
from dspark.state.upload import Upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = StateGeometry.for_model(
    slots=8, window_pages=12, verify_width=6, c4_layers=3, c128_layers=2
)
BUSY = 20_000_000  # clock cycles a stream is kept busy, about 10 ms


def filled(device="cuda") -> StateLifecycle:
    state = StateLifecycle(SIZES, device)
    for rows in state.pools.tensors.values():
        rows.fill_(1.0)
    return state


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def verify_arguments():
    return ints(3, -1, 5), ints(134, 0, 700), ints(1, 1, 4), ints(6, 6, 6)


@pytest.fixture
def warm():
    """Kernels compiled, so that nothing below waits for the compiler."""
    state = filled()
    state.pages.release(ints(1))
    state.slots.assigned([1])
    state.begin_forward()
    state.rollback.after_verify(*verify_arguments())
    torch.cuda.synchronize()


def test_every_event_equals_the_cpu(warm):
    pools = []
    for device in ("cpu", "cuda"):
        state = filled(device)
        state.pages.release(torch.tensor([2, 7, -1], device=device))
        state.slots.assigned([4, 8])
        state.begin_forward()
        state.rollback.after_verify(*(a.to(device) for a in verify_arguments()))
        pools.append({kind: rows.cpu() for kind, rows in state.pools.tensors.items()})
    for kind, rows in pools[0].items():
        assert torch.equal(pools[1][kind], rows), kind


def test_I18_nothing_waits_for_the_device(warm):
    state, pages, arguments = filled(), ints(2, 7), verify_arguments()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):  # more than the upload ring holds
            state.pages.release(pages)
            state.slots.assigned([4, 8])
            assert state.begin_forward() == 2
            state.rollback.after_verify(*arguments)
            state.pages.release(pages)
            assert state.pages.fence() is not None
            state.slots.released([4, 8])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_slot_lists_survive_a_device_that_lags_behind(warm):
    """Eight uploads wait behind a busy stream; each must still carry its own slots."""
    state = filled()
    before = state.pools.tensors["c128"].clone()
    torch.cuda._sleep(BUSY)
    for slot in range(1, 9):
        state.slots.assigned([slot])
        state.begin_forward()
    assert (state.pools.tensors["c128"][:, SIZES.c128.ring :, :512] == 0).all()
    first = state.pools.tensors["c128"][:, : SIZES.c128.ring]
    assert torch.equal(first, before[:, : SIZES.c128.ring])


def test_uploads_of_every_type_survive_a_device_that_lags_behind(warm):
    """More than the ring holds, in several shapes, without a wait before it is full."""
    sent = [
        torch.arange(12, dtype=torch.float64).view(3, 4),
        torch.tensor([True, False, True]),
        torch.tensor([2**60, -1]),
        torch.arange(5, dtype=torch.int32),
    ]
    upload = Upload(96, torch.device("cuda"))
    torch.cuda._sleep(BUSY)
    arrived = [upload(host) for host in sent]
    assert all(torch.equal(found.cpu(), host) for found, host in zip(arrived, sent, strict=True))


def test_clear_runs_behind_the_step_in_flight(warm):
    """The old owner's last writes land before the clear, though released long before."""
    state = filled()
    forward, schedule = torch.cuda.Stream(), torch.cuda.Stream()
    rows = state.pools.page_view("c4", 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        state.begin_forward()
        torch.cuda._sleep(BUSY)
        rows[5].fill_(255)  # step in flight
    with torch.cuda.stream(schedule):
        state.pages.release(ints(5))
    with torch.cuda.stream(forward):
        forward.wait_stream(schedule)
        state.begin_forward()
    torch.cuda.synchronize()
    ring = SIZES.c4.ring
    assert (state.pools.tensors["c4"][:, 5 * ring : 6 * ring, :1024] == 0).all()


def test_load_behind_the_fence_survives_clear_and_step_in_flight(warm):
    state = filled()
    forward, load = torch.cuda.Stream(), torch.cuda.Stream()
    rows = state.pools.page_view("c4", 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        state.begin_forward()
        torch.cuda._sleep(BUSY)
        rows[5].fill_(255)
    state.pages.release(ints(5))
    launched = state.pages.fence()
    assert launched is not None
    with torch.cuda.stream(load):
        load.wait_event(launched)
        rows[5].fill_(7)
    with torch.cuda.stream(forward):
        state.begin_forward()
    torch.cuda.synchronize()
    assert (rows[5] == 7).all()


def test_rollback_in_a_graph_and_no_clear_in_capture(warm):
    state, arguments = filled(), verify_arguments()
    expected = filled()
    expected.rollback.after_verify(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert state.begin_forward() == 0
        state.rollback.after_verify(*arguments)
    graph.replay()
    assert torch.equal(state.pools.tensors["c128"], expected.pools.tensors["c128"])


def test_capture_with_pending_clears_is_refused(warm):
    state = filled()
    state.pages.release(ints(5))
    refused = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            state.begin_forward()
        except PageError as error:
            refused.append(str(error))
    assert refused == ["state clears are pending while a CUDA graph is captured"]
