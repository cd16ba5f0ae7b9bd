"""Query and key preparation kernels under the interpreter against the references."""

import torch
from kv_cases import assert_pool_close, rope_table

from dspark.kernels.common.kv_pages import page_stride
from dspark.kernels.qkv import inv_rope, kv_norm_rope_store, q_kv_prepare, q_norm_rope, reference

EPS = 1e-6


def heads(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 512, generator=generator).bfloat16()
    return x, torch.tensor([0, 63, 17])


def assert_bf16_step(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for single roundings."""
    assert ((got != want).float().mean()) < 1e-2
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_q_norm_rope():
    q, pos = heads(0)
    got = q_norm_rope(q, rope_table(), pos, EPS)
    assert_bf16_step(got, reference.q_norm_rope(q, rope_table(), pos, EPS))


def test_inv_rope():
    o, pos = heads(1)
    assert_bf16_step(inv_rope(o, rope_table(), pos), reference.inv_rope(o, rope_table(), pos))


def test_kv_norm_rope_store_writes_the_reference_bytes():
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(5, 1536, generator=generator).bfloat16()[:, 1024:]
    kv[3] *= 1e-6  # amax below the floor of the scale
    w = (torch.rand(512, generator=generator) + 0.5).bfloat16()
    pos, slot = torch.tensor([3, 0, 63, 9, 9]), torch.tensor([7, -1, 2, 0, 11]).int()
    got, want = (torch.full((4, page_stride(3)), 255, dtype=torch.uint8) for _ in range(2))
    kv_norm_rope_store(kv, w, rope_table(), pos, slot, got, 3, EPS)
    reference.kv_norm_rope_store(kv, w, rope_table(), pos, slot, want, 3, EPS)
    assert_pool_close(got, want, 3)


def test_one_launch_equals_two():
    generator = torch.Generator().manual_seed(3)
    q, pos = heads(4)
    kv = torch.randn(3, 512, generator=generator).bfloat16()
    w, slot = torch.rand(512, generator=generator).bfloat16(), torch.tensor([5, -1, 0]).int()
    one, two = (torch.full((2, page_stride(3)), 255, dtype=torch.uint8) for _ in range(2))
    got = q_kv_prepare(q, kv, w, rope_table(), pos, slot, one, 3, EPS)
    kv_norm_rope_store(kv, w, rope_table(), pos, slot, two, 3, EPS)
    assert torch.equal(got, q_norm_rope(q, rope_table(), pos, EPS))
    assert torch.equal(one, two)


def test_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    assert q_norm_rope(torch.empty(0, 2, 512).bfloat16(), rope_table(), none).shape == (0, 2, 512)
