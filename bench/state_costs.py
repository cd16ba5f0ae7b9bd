"""Bytes and time of every clearing event of the state life cycle, for Flash's layer counts.

    python -m dspark.bench.state_costs [--device cpu] [--slots 8] [--pages 64] [--repeats 30]

Prints one line an event: bytes written, median and worst milliseconds. On a GPU the time is the
device's, on the CPU the call's.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dspark.state import StateGeometry, StateLifecycle

ROW_BYTES = {"c128": 1024 * 4, "c4": 2048 * 4, "idx": 512 * 4}
C4_LAYERS, C128_LAYERS, VERIFY = 21, 20, 6


def flash(slots: int, pages: int) -> StateGeometry:
    return StateGeometry.for_model(
        slots=slots,
        window_pages=pages,
        verify_width=VERIFY,
        c4_layers=C4_LAYERS,
        c128_layers=C128_LAYERS,
    )


def events(state: StateLifecycle, device: str) -> list[tuple[str, int, Callable[[], object]]]:
    """(name, bytes written, call) of each event; release and assignment are part of the call."""
    sizes = state.geometry
    page_bytes = C4_LAYERS * sizes.c4.ring * (ROW_BYTES["c4"] + ROW_BYTES["idx"])
    slot_bytes = C128_LAYERS * sizes.c128.ring * ROW_BYTES["c128"]
    rejected = (VERIFY - 1) * C128_LAYERS * ROW_BYTES["c128"]

    def rollback(requests: int) -> Callable[[], object]:
        slot = torch.arange(1, requests + 1, device=device)
        start = torch.full_like(slot, 1000)
        commit, verify = torch.ones_like(slot), torch.full_like(slot, VERIFY)
        return lambda: state.rollback.after_verify(slot, start, commit, verify)

    def clear_pages(count: int) -> Callable[[], object]:
        pages = torch.arange(1, count + 1, device=device)

        def call():
            state.pages.release(pages)
            state.begin_forward()

        return call

    def clear_slots(count: int) -> Callable[[], object]:
        slots = list(range(1, count + 1))

        def call():
            state.slots.assigned(slots)
            state.begin_forward()
            state.slots.released(slots)

        return call

    return [
        ("head of a forward, nothing pending", 0, state.begin_forward),
        ("rollback, 1 request, 5 rejected", rejected, rollback(1)),
        (
            f"rollback, {sizes.slots} requests, 5 rejected each",
            sizes.slots * rejected,
            rollback(sizes.slots),
        ),
        ("clear 1 page (C4 and indexer)", page_bytes, clear_pages(1)),
        ("clear 1 slot (C128)", slot_bytes, clear_slots(1)),
        (
            "flush: all pages and slots",
            sizes.window_pages * page_bytes + sizes.slots * slot_bytes,
            flush(state),
        ),
    ]


def flush(state: StateLifecycle) -> Callable[[], object]:
    def call():
        state.reset()
        state.begin_forward()

    return call


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> list[float]:
    call()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    state = StateLifecycle(flash(args.slots, args.pages), args.device)
    print(f"{'event':38} {'MB':>8} {'median ms':>10} {'worst ms':>9}")
    for name, size, call in events(state, args.device):
        times = milliseconds(call, args.device, args.repeats)
        print(f"{name:38} {size / 1e6:8.2f} {statistics.median(times):10.3f} {max(times):9.3f}")


if __name__ == "__main__":
    main()
