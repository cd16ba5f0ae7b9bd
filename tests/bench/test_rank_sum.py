"""What the bench of a sum over ranks counts, and that its publishers compile for an Ada card."""

import pytest
import torch
import triton
from triton.compiler import ASTSource

from dspark.bench import rank_sum
from dspark.kernels.collective import host_layout
from dspark.kernels.tooling.entries import launches_of, meta, target


def test_bytes_of_one_sum():
    """A row is 8 KB: one goes out and eight come in. Six go out whole and as an eighth; as much as
    two of them comes in of all ranks together, once as partials and once as sums."""
    assert rank_sum.bytes_of(1) == (8 * 8192, 8192)
    assert rank_sum.bytes_of(6) == (12 * 8192, 6 * 8192 + 6 * 1024)


def test_half_the_link_costs_what_the_bytes_take():
    """96 KB at 46 GB/s are 2.137 us, at half of it twice as much."""
    assert rank_sum.projected(10.0, 6) == pytest.approx(10.0 + 98_304 / 46e9 * 1e6)


def test_the_others_publish_their_first_columns_for_their_sums():
    rows = torch.randn(8, 2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = rank_sum.expected_total(rows)
    assert torch.equal(total[:, :512], rank_sum.reference_sum(rows)[:, :512])
    assert torch.equal(total[:, 512:1024], rows[1, :, :512])
    assert torch.equal(total[:, 3584:], rows[7, :, :512])
    assert torch.equal(rank_sum.expected_total(rows[:, :1]), rank_sum.reference_sum(rows[:, :1]))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("late", [False, True])
def test_publishers_compile(rows, late):
    layout = rank_sum.LAYOUT
    views = host_layout.views(meta(torch.uint8, layout.nbytes), layout)
    payload = meta(torch.bfloat16, 8, rows, 4096)
    (launch,) = launches_of(
        lambda: rank_sum.publish(payload, views, meta(torch.int64, 2), 1000, 1984, late)
    )
    names = launch.kernel.arg_names
    signature = {name: launch.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, signature, dict(launch.constexprs), aligned)
    ptx = triton.compile(source, target=target(), options={"num_warps": 8}).asm["ptx"]
    assert ptx.count("st.release.sys") == (1 if rows == 1 else 2)
