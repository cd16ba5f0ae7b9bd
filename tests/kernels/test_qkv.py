"""Query and latent references: formulas, byte layout, padded rows, batch invariance."""

import re
from pathlib import Path

import pytest
import torch

from dspark import kernels
from dspark.kernels.common.kv_pages import load_slots, page_stride, store_slots, ue8m0
from dspark.kernels.qkv import inv_rope, kv_norm_rope_store, q_kv_prepare, q_norm_rope

EPS = 1e-6


def table(positions: int = 64) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def rope_fp64(x: torch.Tensor, pos: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """Textbook rotation of interleaved pairs of the last 64 dims."""
    row = table()[pos].double()
    shape = [-1] + [1] * (x.ndim - 2) + [32]
    cos, sin = row[:, :32].view(shape), sign * row[:, 32:].view(shape)
    out = x.double().clone()
    even, odd = x[..., -64::2].double(), x[..., -63::2].double()
    out[..., -64::2] = even * cos - odd * sin
    out[..., -63::2] = even * sin + odd * cos
    return out


def test_q_norm_rope_matches_the_formula():
    torch.manual_seed(0)
    q, pos = torch.randn(5, 3, 512), torch.tensor([0, 1, 7, 31, 63])
    normed = q.double() / (q.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(
        q_norm_rope(q, table(), pos, EPS).double(), rope_fp64(normed, pos), atol=1e-6, rtol=1e-6
    )


def test_q_norm_rope_rounds_to_bf16_before_it_rotates():
    torch.manual_seed(1)
    q, pos = torch.randn(4, 2, 512).bfloat16(), torch.tensor([3, 9, 0, 50])
    x = q.double()
    normed = (x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()).bfloat16()
    assert torch.equal(q_norm_rope(q, table(), pos, EPS), rope_fp64(normed, pos).bfloat16())


def test_inverse_rope_undoes_rope():
    torch.manual_seed(2)
    x, pos = torch.randn(6, 4, 512), torch.arange(6) * 9
    rotated = rope_fp64(x, pos).float()
    torch.testing.assert_close(inv_rope(rotated, table(), pos), x, atol=1e-6, rtol=1e-6)
    assert torch.equal(inv_rope(x, table(), pos)[..., :448], x[..., :448])


@pytest.mark.parametrize(("slots", "stride"), [(256, 149504), (64, 37376), (2, 1168), (1, 592)])
def test_page_stride_is_584_bytes_a_slot_rounded_to_16(slots, stride):
    assert page_stride(slots) == stride


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (448.0, 127),  # exactly one: no rounding up
        (448.0 * 2**-3, 124),
        (449.0, 128),
        (0.0, 105),  # the 1e-4 floor: 1e-4/448 = 2^-22.1
        (2.0**-10 * 448 * 1.0001, 118),
    ],
)
def test_scale_exponent_is_the_next_power_of_two(amax, exponent):
    assert ue8m0(torch.tensor([amax])).item() == exponent


def test_packed_slot_bytes():
    """One hand-computed slot: data at offset * 576, scales after the page's data."""
    kv = torch.zeros(1, 512)
    kv[0, 0], kv[0, 1], kv[0, 64], kv[0, 448] = 448.0, 3.0, 1.0, 1.0
    pool = torch.full((3, page_stride(2)), 0xAB, dtype=torch.uint8)
    store_slots(pool, 2, torch.tensor([5], dtype=torch.int32), kv)
    page = pool[2]
    assert page[576] == 0x7E  # 448, scale 1
    assert page[577] == 0x44  # 3 = 1.5 * 2^1
    assert page[576 + 64] == 0x78  # 1 / 2^-8 = 256
    assert page[576 + 448 : 576 + 450].tolist() == [0x80, 0x3F]  # bf16 1.0
    assert page[2 * 576 + 8 : 2 * 576 + 11].tolist() == [127, 119, 105]
    assert (pool[:2] == 0xAB).all()
    assert (page[:576] == 0xAB).all()


@pytest.mark.parametrize("slots_per_page", [256, 64, 2])
def test_slots_round_trip_within_fp8_precision(slots_per_page):
    torch.manual_seed(3)
    kv = torch.randn(20, 512) * 10 ** torch.linspace(-3, 3, 20)[:, None]
    pool = torch.full((30, page_stride(slots_per_page)), 255, dtype=torch.uint8)
    slot = torch.randperm(30 * slots_per_page)[:20].int()
    store_slots(pool, slots_per_page, slot, kv)
    back = load_slots(pool, slots_per_page, slot)
    amax = kv[:, :448].abs().unflatten(1, (7, 64)).amax(-1, keepdim=True).double()
    error = (back - kv.double())[:, :448].unflatten(1, (7, 64)).abs()
    assert (error <= amax * 2**-4 + 1e-9).all()
    assert torch.equal(back[:, 448:], kv[:, 448:].bfloat16().double())
    # What was stored is a fixed point.
    store_slots(pool, slots_per_page, slot, back.float())
    assert torch.equal(load_slots(pool, slots_per_page, slot), back)


def test_float_pool_keeps_values_unrounded():
    torch.manual_seed(4)
    kv, pool = torch.randn(3, 512), torch.full((2, 4 * 512), torch.nan)
    slot = torch.tensor([6, -1, 1], dtype=torch.int32)
    store_slots(pool, 4, slot, kv)
    assert torch.equal(load_slots(pool, 4, slot)[[0, 2]], kv[[0, 2]].double())
    assert pool.view(-1, 512)[[0, 2, 3, 4, 5, 7]].isnan().all()


def test_minus_one_is_never_read_or_written():
    pool = torch.full((2, page_stride(64)), 255, dtype=torch.uint8)  # e4m3 NaN everywhere
    slot = torch.tensor([[-1, -1]], dtype=torch.int32)
    assert torch.equal(load_slots(pool, 64, slot), torch.zeros(1, 2, 512, dtype=torch.float64))
    store_slots(pool, 64, slot[0], torch.ones(2, 512))
    assert (pool == 255).all()


def test_kv_norm_rope_store_matches_the_formula():
    torch.manual_seed(5)
    wide = torch.randn(6, 1536).bfloat16()
    kv, w, pos = wide[:, 1024:], torch.rand(512).bfloat16() + 0.5, torch.arange(6) * 5
    slot = torch.tensor([9, 3, -1, 0, 14, 2], dtype=torch.int32)
    x = kv.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w.double()
    expected = rope_fp64(x, pos)

    plain = torch.full((4, 4 * 512), torch.nan)
    kv_norm_rope_store(kv, w, table(), pos, slot, plain, 4, EPS)
    real = slot >= 0
    stored = load_slots(plain, 4, slot)[real]
    torch.testing.assert_close(stored, expected[real], atol=1e-6, rtol=1e-6)

    packed, direct = (torch.zeros(4, page_stride(4), dtype=torch.uint8) for _ in range(2))
    kv_norm_rope_store(kv, w, table(), pos, slot, packed, 4, EPS)
    store_slots(direct, 4, slot, expected.float())
    assert torch.equal(packed, direct)


def test_rows_do_not_depend_on_their_batch():
    torch.manual_seed(6)
    q, kv = torch.randn(48, 4, 512).bfloat16(), torch.randn(48, 512).bfloat16()
    w, pos = torch.rand(512).bfloat16(), torch.randint(0, 64, (48,))
    order = torch.randperm(48)
    whole = q_norm_rope(q, table(), pos, EPS)
    pool = torch.zeros(1, page_stride(64), dtype=torch.uint8)
    kv_norm_rope_store(kv, w, table(), pos, torch.arange(48).int(), pool, 64, EPS)
    for rows in [*order[:8].split(1), order[:6], order]:
        assert torch.equal(q_norm_rope(q[rows], table(), pos[rows], EPS), whole[rows])
        again = torch.zeros_like(pool)
        kv_norm_rope_store(kv[rows], w, table(), pos[rows], rows.int(), again, 64, EPS)
        assert torch.equal(load_slots(again, 64, rows), load_slots(pool, 64, rows))


def test_one_call_equals_two():
    torch.manual_seed(7)
    q, kv = torch.randn(3, 4, 512).bfloat16(), torch.randn(3, 512).bfloat16()
    w, pos, slot = torch.rand(512), torch.tensor([3, 9, 0]), torch.tensor([5, -1, 0]).int()
    one, two = (torch.zeros(2, page_stride(3), dtype=torch.uint8) for _ in range(2))
    got = q_kv_prepare(q, kv, w, table(), pos, slot, one, 3, EPS)
    kv_norm_rope_store(kv, w, table(), pos, slot, two, 3, EPS)
    assert torch.equal(got, q_norm_rope(q, table(), pos, EPS))
    assert torch.equal(one, two)


def test_no_rows():
    empty = torch.empty(0, 4, 512).bfloat16()
    none = torch.empty(0, dtype=torch.int64)
    assert q_norm_rope(empty, table(), none, EPS).shape == (0, 4, 512)
    pool = torch.zeros(1, page_stride(2), dtype=torch.uint8)
    kv_norm_rope_store(empty[:, 0], torch.ones(512), table(), none, none.int(), pool, 2, EPS)
    assert (pool == 0).all()


def test_errors_name_the_shapes():
    with pytest.raises(ValueError, match=r"heads must be \[T, H, 512\]"):
        q_norm_rope(torch.ones(2, 3, 256), table(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="pos and slot"):
        kv_norm_rope_store(
            torch.ones(2, 512), torch.ones(512), table(), torch.zeros(1).long(),
            torch.zeros(2).int(), torch.zeros(1, page_stride(2), dtype=torch.uint8), 2,
        )  # fmt: skip


@pytest.mark.parametrize(
    "module", ["common/kv_pages_kernel.py", "compress/kernel.py", "indexer/kernel.py"]
)
def test_page_offsets_are_64_bit(module):
    """A page id times a byte stride passes 2^31 in a pool of 2 GiB: each such product is i64."""
    source = Path(kernels.__file__).parent.joinpath(module).read_text()
    products = re.findall(r"\S+ \* stride\b", source)
    assert products
    assert [p for p in products if ".to(tl.int64)" not in p] == []
