"""Query and key preparation on a GPU at serving shapes, against the references."""

import pytest
import torch
from kv_cases import assert_pool_close, rope_table

from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.qkv import inv_rope, kv_norm_rope_store, q_kv_prepare, q_norm_rope, reference

pytestmark = pytest.mark.gpu
EPS = 1e-6
TABLE = rope_table(4096)


def heads(rows: int, count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, count, 512, generator=generator).bfloat16()
    return x, torch.randint(0, 4096, (rows,), generator=generator)


@pytest.mark.parametrize(("rows", "count"), [(1, 8), (48, 8), (5, 64), (2000, 8)])
def test_query_rope_and_back(device, rows, count):
    q, pos = heads(rows, count, rows)
    got = q_norm_rope(q.to(device), TABLE.to(device), pos.to(device), EPS).cpu()
    want = reference.q_norm_rope(q, TABLE, pos, EPS)
    assert_rotated_alike(got, want)
    back = inv_rope(got.to(device), TABLE.to(device), pos.to(device)).cpu()
    assert_rotated_alike(back, reference.inv_rope(got, TABLE, pos))


def assert_rotated_alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """bf16 heads [T, H, 512] that differ by single roundings before and after the rotation.

    A rotated value may be the small difference of two large products. An input one bf16 step
    (2^-7) away then moves it by 2^-7 of its pair's length, which the rotation keeps, and the
    rounding of the result by as much again.
    """
    assert (got != want).float().mean() < 1e-2
    torch.testing.assert_close(got[..., :448], want[..., :448], rtol=2**-7, atol=1e-5)
    pairs = want[..., 448:].float().unflatten(-1, (-1, 2))
    error = got[..., 448:].float().unflatten(-1, (-1, 2)) - pairs
    assert (error.abs() <= 2**-6 * pairs.norm(dim=-1, keepdim=True) + 1e-5).all()


@pytest.mark.parametrize("rows", [1, 6, 48, 3000])
def test_kv_store(device, rows):
    kv, pos = heads(rows, 3, rows)
    kv = kv.flatten(1)[:, 512:1024]
    kv[0] *= 1e-6
    generator = torch.Generator().manual_seed(0)
    w = (torch.rand(512, generator=generator) + 0.5).bfloat16()
    pages = 2 + rows // 256
    slot = torch.randperm(pages * 256, generator=generator)[:rows].int()
    slot[rows // 2] = -1
    pool = torch.full((pages, page_stride(256)), 255, dtype=torch.uint8)
    got = pool.to(device)
    kv_norm_rope_store(
        kv.to(device), w.to(device), TABLE.to(device), pos.to(device), slot.to(device), got, 256
    )
    reference.kv_norm_rope_store(kv, w, TABLE, pos, slot, pool, 256, EPS)
    assert_pool_close(got, pool, 256)


def test_rows_do_not_depend_on_their_batch(device):
    q, pos = (x.to(device) for x in heads(48, 8, 1))
    table, w = TABLE.to(device), torch.ones(512, device=device).bfloat16()
    whole = q_norm_rope(q, table, pos)
    slot = torch.arange(48, device=device).int()
    pool = torch.zeros(1, page_stride(64), dtype=torch.uint8, device=device)
    kv_norm_rope_store(q[:, 0], w, table, pos, slot, pool, 64)
    order = torch.randperm(48, device=device)
    again = torch.zeros_like(pool)
    for rows in [*order[:24].split(1), order[24:30], order[30:]]:
        assert torch.equal(q_norm_rope(q[rows], table, pos[rows]), whole[rows])
        kv_norm_rope_store(q[rows, 0], w, table, pos[rows], slot[rows], again, 64)
    assert torch.equal(again, pool)


def test_one_launch_equals_two(device):
    q, pos = (x.to(device) for x in heads(48, 8, 3))
    table, w = TABLE.to(device), torch.ones(512, device=device).bfloat16()
    kv, slot = q[:, 3].contiguous(), torch.arange(48, device=device).int() - 1
    one, two = (torch.zeros(1, page_stride(64), dtype=torch.uint8, device=device) for _ in range(2))
    got = q_kv_prepare(q, kv, w, table, pos, slot, one, 64)
    kv_norm_rope_store(kv, w, table, pos, slot, two, 64)
    torch.testing.assert_close(got, q_norm_rope(q, table, pos), rtol=2**-7, atol=1e-6)
    assert torch.equal(one, two)


def test_pool_beyond_two_to_the_31(device):
    kv, pos = (x.to(device) for x in heads(4, 1, 2))
    pages = 2**31 // page_stride(256) + 10
    big = torch.zeros(pages, page_stride(256), dtype=torch.uint8, device=device)
    small = torch.zeros(1, page_stride(256), dtype=torch.uint8, device=device)
    w, slot = torch.ones(512, device=device).bfloat16(), torch.arange(4, device=device).int()
    kv_norm_rope_store(kv[:, 0], w, TABLE.to(device), pos, slot, small, 256)
    kv_norm_rope_store(kv[:, 0], w, TABLE.to(device), pos, slot + (pages - 1) * 256, big, 256)
    assert torch.equal(big[-1], small[0])
    assert not big[:-1].any()
