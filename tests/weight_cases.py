"""Seeded weights and activations for the linear, hyper-connection and expert tests."""

import torch

from dspark.kernels.hyper import HyperSite, prepare_hyper
from dspark.kernels.linear import Fp8Weight, prepare_fp8
from dspark.kernels.moe import ExpertWeights, Route, prepare_experts, reference


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).bfloat16()


def random_fp8(n: int, k: int, seed: int = 0) -> Fp8Weight:
    g = generator(seed)
    codes = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
    scales = torch.randint(118, 128, (-(-n // 128), -(-k // 128)), generator=g)
    return prepare_fp8(codes, scales.to(torch.uint8))


def random_experts(count: int, hidden: int, width: int, seed: int = 0) -> ExpertWeights:
    g = generator(seed)

    def byte(*shape, low=0, high=256):
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)

    return prepare_experts(
        byte(count, 2 * width, hidden // 2),
        byte(count, 2 * width, hidden // 32, low=119, high=126),
        byte(count, hidden, width // 2),
        byte(count, hidden, width // 32, low=119, high=126),
    )


def random_route(rows: int, count: int, k: int, seed: int = 3) -> Route:
    g = generator(seed)
    logits, bias = torch.randn(rows, count, generator=g), torch.randn(count, generator=g) * 0.1
    return reference.route(logits, bias, None, torch.zeros(rows).long(), k, 1.5)


def hyper_site(hidden: int, outputs: int = 24, seed: int = 0) -> HyperSite:
    g = generator(seed)
    fn = torch.randn(outputs, 4 * hidden, generator=g) * hidden**-0.5
    scale = torch.rand(3 if outputs == 24 else 1, generator=g) + 0.3
    return HyperSite(prepare_hyper(fn), scale, torch.randn(outputs, generator=g))


def random_streams(rows: int, hidden: int, seed: int = 1, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, 4, hidden, generator=generator(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float = 3e-3) -> None:
    """Relative rms within `bound`, largest error within five times that of the largest value."""
    got, want = got.double().cpu(), want.double().cpu()
    assert (got - want).norm() <= bound * want.norm()
    assert (got - want).abs().max() <= 5 * bound * want.abs().max()


def assert_rows_invariant(function, rows: int) -> torch.Tensor:
    """`function(index)` computes the rows in `index`; a row's bits never depend on the others.

    Each row alone == inside the first six == inside a permutation of all. Returns all rows.
    """
    whole = function(torch.arange(rows))
    order = torch.randperm(rows, generator=generator(7))
    assert torch.equal(function(order), whole[order])
    assert torch.equal(function(torch.arange(6)), whole[:6])
    for i in range(0, rows, 5):
        assert torch.equal(function(torch.tensor([i])), whole[i : i + 1])
    return whole
