"""Shared by every kernel test: poisoned memory and the GPU device.

Where a test lives says how it runs:

* `tests/kernels/*.py` - torch references, and `gpu`-marked tests of the Triton kernels;
* `tests/kernels/interpreted/*.py` - Triton kernels under the interpreter, in a process of its own
  (see its conftest).

`DSPARK_TEST_SM89=1 pytest -m gpu` on a Hopper card runs the Ada instruction stream.
"""

import pytest
import torch

_EMPTY_FACTORIES = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
]


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill with the worst bits: NaN for floats (fp8 and bf16 too), an absurd index for integers."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x.view(torch.uint8).fill_(0x7F)
    elif x.is_floating_point():
        x.fill_(torch.nan)
    elif x.dtype in (torch.uint8, torch.bool):
        x.fill_(0xFF)
    elif not x.is_complex():
        x.fill_(torch.iinfo(x.dtype).min)
    return x


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """`torch.empty` and its relatives return poison, so a value nobody wrote cannot look right."""
    for owner, name in _EMPTY_FACTORIES:
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            return poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)


def goodness_of_fit(tokens: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    """(chi-square p value, total variation) of observed tokens against probabilities p."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    assert (counts[p == 0] == 0).all(), "a token of probability 0 was emitted"
    expected = p.double() / p.double().sum() * counts.sum()
    live = expected > 0
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(freedom, statistic / 2)
    return float(tail), float((counts - expected).abs().sum() / 2 / counts.sum())


@pytest.fixture
def goodness():
    """`goodness_of_fit`, for tests of a sampler's law."""
    return goodness_of_fit


@pytest.fixture
def device() -> torch.device:
    """Where a `gpu` test puts its tensors."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
