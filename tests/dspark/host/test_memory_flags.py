"""Memory flags follow from what the cards hold; given ones are kept or refused."""

from types import SimpleNamespace

import pytest

from dspark.errors import UsageError
from dspark.host import memory_flags
from dspark.host.memory_budget import GIB, MIB
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

RANK = ModelConfig.from_hf(presets.full_rank())


class Flags(SimpleNamespace):
    """The fields of ServerArgs that memory depends on, as the command line leaves them."""

    swa_full_tokens_ratio = 0.8


def flags(**given) -> Flags:
    unset = dict.fromkeys(
        (
            "max_running_requests",
            "max_total_tokens",
            "context_length",
            "chunked_prefill_size",
            "mem_fraction_static",
            "speculative_algorithm",
            "speculative_dspark_block_size",
            "cuda_graph_backend_decode",
        )
    )
    numbers = {"tp_size": 1, "nnodes": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    switches = {"disable_cuda_graph": False, "disable_decode_cuda_graph": False}
    return Flags(**(unset | numbers | switches | {"max_prefill_tokens": 16384} | given))


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """Function (GiB) -> None: what the server may take of a card."""
    monkeypatch.setenv(memory_flags.CARD_BYTES, str(int(23.4 * GIB)))
    return lambda gib: monkeypatch.setenv(memory_flags.CARD_BYTES, str(int(gib * GIB)))


def fill(given: Flags) -> Flags:
    memory_flags.fill(given, RANK, memory_flags.card_bytes(given, on_cpu=False))
    return given


def test_what_was_left_out_is_chosen():
    found = fill(flags(speculative_algorithm="DSPARK"))
    assert found.max_running_requests == 8
    assert found.context_length >= 128_000
    assert found.chunked_prefill_size == 2048
    assert found.mem_fraction_static == memory_flags.NO_BOUND
    assert found.swa_full_tokens_ratio == memory_flags.WINDOW_RATIO
    assert found.max_total_tokens is None  # the worker's to decide, its weights are loaded


def test_what_was_given_is_kept():
    given = {
        "max_running_requests": 3,
        "context_length": 4000,
        "chunked_prefill_size": 512,
        "mem_fraction_static": 0.95,
        "max_total_tokens": 5120,
        "swa_full_tokens_ratio": 1.0,
    }
    found = fill(flags(**given))
    assert given.items() <= vars(found).items()


def test_prompts_without_chunks_are_no_longer_than_a_batch():
    found = fill(flags(chunked_prefill_size=-1, max_prefill_tokens=4096))
    assert found.context_length == 4096
    found = fill(flags(chunked_prefill_size=-1, max_prefill_tokens=4096, context_length=6144))
    assert found.context_length == 6144
    assert memory_flags.given_prompt_rows(found, RANK) == 6144


@pytest.mark.parametrize(
    ("gib", "given", "said"),
    [
        (2.0, {}, "but 2.00 GiB are free"),
        (23.4, {"max_running_requests": 900}, "--max-running-requests 900 needs"),
        (23.4, {"context_length": 1 << 20}, "--context-length 1048576 needs"),
        (23.4, {"mem_fraction_static": 0.8}, "--mem-fraction-static 0.8 gives 18.72 GiB"),
    ],
)
def test_refusals_are_one_sentence_with_numbers(card, gib, given, said):
    card(gib)
    with pytest.raises(UsageError) as refused:
        fill(flags(speculative_algorithm="DSPARK", **given))
    message = str(refused.value)
    assert said in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("refuse", "given", "said"),
    [
        (
            lambda given: memory_flags.refuse_uneven_tokens(given),
            {"max_total_tokens": 1000},
            "such as 768 or 1024",
        ),
        (
            lambda given: memory_flags.refuse_long_context(given, RANK),
            {"context_length": 2 << 20},
            "longer than the 1048576 tokens",
        ),
    ],
)
def test_impossible_numbers_are_named(refuse, given, said):
    refuse(flags())
    with pytest.raises(UsageError, match=said):
        refuse(flags(**given))


@pytest.mark.parametrize("said", ["", "0", "24GB", "-1"])
def test_a_card_is_a_number_of_bytes(monkeypatch, said):
    monkeypatch.setenv(memory_flags.CARD_BYTES, said)
    with pytest.raises(UsageError, match="must be a number of bytes"):
        memory_flags.card_bytes(flags(), on_cpu=True)


def test_cards_are_asked_one_by_one(monkeypatch):
    monkeypatch.delenv(memory_flags.CARD_BYTES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab,6")
    asked = []

    def answer(command):
        asked.append(command[-1])
        return {"4": 24_000, "GPU-ab": 23_000}.get(command[-1])

    monkeypatch.setattr(memory_flags, "first_number", answer)
    assert memory_flags.card_bytes(flags(tp_size=2), on_cpu=False) == 23_000 * MIB
    assert asked == ["4", "GPU-ab"]
    assert memory_flags.card_bytes(flags(), on_cpu=True) is None


def test_without_the_driver_s_tool_a_short_process_is_asked(monkeypatch):
    monkeypatch.delenv(memory_flags.CARD_BYTES)
    monkeypatch.setattr(
        memory_flags, "first_number", lambda c: 5 * GIB if "mem_get_info" in c[-1] else None
    )
    assert memory_flags.card_bytes(flags(), on_cpu=False) == 5 * GIB
    monkeypatch.setattr(memory_flags, "first_number", lambda command: None)
    with pytest.raises(UsageError, match="set DSPARK_CARD_BYTES"):
        memory_flags.card_bytes(flags(), on_cpu=False)


def test_a_command_s_number():
    assert memory_flags.first_number(("echo", "12 MiB")) == 12
    assert memory_flags.first_number(("echo", "none")) is None
    assert memory_flags.first_number(("/nowhere/tool",)) is None
