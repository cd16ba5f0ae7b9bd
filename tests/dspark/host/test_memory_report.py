"""What a worker makes of the memory that its weights leave."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from dspark.errors import UsageError
from dspark.host import memory_budget, memory_report
from dspark.host.memory_budget import GIB
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

RANK = presets.full_rank()


def configurator(context=8192, **given) -> SimpleNamespace:
    """SGLang's KVCacheConfigurator after resolution, on a CPU."""
    args = {
        "device": "cpu",
        "tp_size": 1,
        "model_path": "/model",
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": "/model",
        "speculative_num_draft_tokens": 6,
        "max_running_requests": 8,
        "max_total_tokens": None,
        "chunked_prefill_size": 2048,
        "swa_full_tokens_ratio": 0.05,
        "mem_fraction_static": 0.999,
        "context_length": context,
        "max_prefill_tokens": 16384,
    }
    return SimpleNamespace(
        device="cpu",
        model=None,
        server_args=SimpleNamespace(**(args | given)),
        model_config=SimpleNamespace(hf_config=RANK, context_len=context),
        ps=SimpleNamespace(tp_rank=0),
    )


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """Function (GiB) -> None: bytes of the card that a CPU stands in for."""

    def hold(gib: float) -> None:
        monkeypatch.setenv("DSPARK_CARD_BYTES", str(int(gib * GIB)))

    hold(23.4)
    return hold


def test_the_pool_takes_what_the_weights_leave(caplog):
    caplog.set_level("INFO")
    made = memory_report.measure(configurator(context=65536))
    assert made.budget.total <= made.available
    left = made.available - made.budget.total - memory_budget.FRAGMENTS
    assert 0 <= left < 4 << 20  # less than one more page needs
    assert "Memory of each card" in caplog.text
    section = memory_report.section(made)
    assert section["planned"]["tokens"] == made.budget.tokens
    assert len(section["gives_more"]) == 3


@pytest.mark.parametrize("tokens", [512, 8192, 100_096])
def test_a_pool_that_was_asked_for_is_exactly_that(tokens):
    assert memory_report.measure(configurator(max_total_tokens=tokens)).budget.tokens == tokens


def test_a_pool_that_does_not_fit_is_one_sentence():
    with pytest.raises(UsageError, match="leave room for a pool of") as refused:
        memory_report.measure(configurator(max_total_tokens=1 << 20))
    assert "\n" not in str(refused.value)


def test_a_share_for_weights_and_pools_is_kept():
    made = memory_report.measure(configurator(mem_fraction_static=0.92))
    held = made.budget.weights + made.budget.draft + made.budget.pools
    assert held <= int(0.92 * int(23.4 * GIB))


def test_a_large_card_is_not_filled_for_a_short_context(card):
    card(139)
    made = memory_report.measure(configurator(context=4096))
    assert made.budget.tokens == memory_budget.KEPT_CONTEXTS * 8 * 4096


def test_a_cpu_without_a_card_holds_what_the_flags_say(monkeypatch):
    monkeypatch.delenv("DSPARK_CARD_BYTES")
    made = memory_report.measure(configurator(max_total_tokens=65536))
    assert made.available is None
    assert made.budget.tokens == 65536


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor | None


def test_bytes_of_nested_weights():
    four, three = torch.zeros(4, dtype=torch.float32), torch.zeros(3, dtype=torch.uint8)
    assert memory_report.tensor_bytes([Pair(four, None), (three, [three])]) == 16 + 3 + 3


def test_the_load_is_what_the_flags_resolved_to():
    load = memory_report.load_of(configurator().server_args, ModelConfig.from_hf(RANK), 8192)
    assert (load.requests, load.context, load.prompt_rows) == (8, 8192, 2048)
    assert (load.verify_width, load.stages, load.graphs) == (6, 3, False)
