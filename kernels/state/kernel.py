"""Triton kernels of the state ops: one launch empties rows in every layer of a pool, or of two."""

import triton
import triton.language as tl

from dspark.kernels.common.launch_table import LaunchConfig

LAUNCH = {
    "rollback": LaunchConfig(4, 1, {"BLOCK": 1024}),
    "clear": LaunchConfig(4, 1, {"BLOCK": 1024}),
}


@triton.jit
def _empty_row(pool, row, width, BLOCK: tl.constexpr):
    """kv (first half) 0, score (second half) -inf."""
    base = pool + row.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.where(i < width // 2, 0.0, -float("inf"))
        tl.store(base + i, value.to(pool.dtype.element_ty), mask=i < width)


@triton.jit
def _rollback(
    pool, request_slot, committed, commit_len, rows_run, rows, width, ring, verify_width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request and offset, layer)."""
    request = tl.program_id(0) // verify_width
    offset = tl.program_id(0) % verify_width
    layer = tl.program_id(1)
    slot = tl.load(request_slot + request).to(tl.int64)
    rejected = (offset >= tl.load(commit_len + request)) & (offset < tl.load(rows_run + request))
    if rejected & (slot >= 0):
        row = slot * ring + (tl.load(committed + request).to(tl.int64) + offset) % ring
        _empty_row(pool, layer.to(tl.int64) * rows + row, width, BLOCK)


@triton.jit
def _clear(
    first, second, owners, first_layers, first_rows, first_width, second_rows, second_width, ring,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (owner and ring row, layer); layers of the second pool follow those of the first."""
    owner = tl.load(owners + tl.program_id(0) // ring).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if owner >= 0:
        row = owner * ring + tl.program_id(0) % ring
        if layer < first_layers:
            _empty_row(first, layer * first_rows + row, first_width, BLOCK)
        else:
            _empty_row(second, (layer - first_layers) * second_rows + row, second_width, BLOCK)


def c128_rollback(pool, request_slot, committed, commit_len, rows_run, *, ring, verify_width):
    layers, rows, width = pool.shape
    launch = LAUNCH["rollback"]
    if layers and request_slot.numel():
        _rollback[(request_slot.numel() * verify_width, layers)](
            pool, request_slot, committed, commit_len, rows_run, rows, width, ring, verify_width,
            **launch.keywords,
        )  # fmt: skip


def clear_blocks(pools, owners, *, ring):
    first, second = pools[0], pools[-1]
    layers = sum(pool.shape[0] for pool in pools)
    launch = LAUNCH["clear"]
    if layers and owners.numel():
        _clear[(owners.numel() * ring, layers)](
            first, second, owners, *first.shape, *second.shape[1:], ring,
            **launch.keywords,
        )  # fmt: skip
