"""`dspark plan`: the server's own division of memory; projections name what they assume."""

import json
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dspark import cli
from dspark.commands import plan, projection
from dspark.commands.cards import CARDS
from dspark.errors import UsageError
from dspark.host import capabilities, memory_budget, memory_flags, memory_report
from dspark.host.memory_budget import GIB, MIB, Wishes
from dspark.kernels.collective import GATHERED_ROWS
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

RECORD = Path(__file__).parents[3] / "bench" / "results" / "decode-step-h200.json"
FLASH = ModelConfig.from_hf(presets.flash())
TINY = ModelConfig.from_hf(presets.tiny())
MINI = ModelConfig.from_hf(presets.mini_rank())
RANK = ModelConfig.from_hf(presets.full_rank())
SIZES = Wishes(requests=4, context=1024, prompt_rows=512)


def test_a_small_model_by_hand():
    """TINY: five layers (window, C4, C128, C4, C128) and three stages."""
    wishes = SIZES._replace(tokens=2048)
    found = plan.plan_memory(TINY, 1, 2 * GIB, wishes, drafts=True).budget
    assert found.tokens == 2048
    c4_page, c128_page, latents = 64 * 584, 2 * 584, 256 * 584  # 584 B a latent or entry
    assert found.entries == (8 + 1) * (2 * (c4_page + 64 * 132) + 2 * c128_page)
    # 4 pages of each request, the chunk's two and one are more than the pool has.
    assert found.window == (8 + 1) * (8 * latents + 2 * 16 * (2048 + 512) * 4)
    assert found.rings == (4 + 1) * 2 * 136 * 1024 * 4
    assert found.rope == 2 * (1024 + 256) * 64 * 4
    assert found.tables == 80 * 2048 + 5 * (4 * 1024 + 6 * 512)
    assert found.reserve == 300 * MIB


SERVER = {
    "max_running_requests": None,
    "max_total_tokens": None,
    "context_length": None,
    "chunked_prefill_size": None,
    "mem_fraction_static": None,
    "max_prefill_tokens": 16384,
    "speculative_algorithm": "DSPARK",
    "speculative_dspark_block_size": None,
    "speculative_num_draft_tokens": 6,
    "cuda_graph_backend_decode": None,
    "disable_cuda_graph": False,
    "disable_decode_cuda_graph": False,
    "device": "cuda",
}


class Flags:
    """The fields of ServerArgs that memory depends on."""

    swa_full_tokens_ratio = 0.8

    def __init__(self, **given):
        vars(self).update(SERVER | given)


@pytest.mark.parametrize("gib", [23.5, 47.3])
@pytest.mark.parametrize(("algorithm", "drafts"), [("DSPARK", True), (None, False)])
def test_the_plan_is_what_a_server_computes(monkeypatch, gib, algorithm, drafts):
    """Its launcher chooses the same sizes; its worker divides at least what was planned."""
    monkeypatch.setenv(memory_flags.CARD_BYTES, "1")  # `fill` would set it for good
    rows = 6 if drafts else None
    args = Flags(tp_size=8, speculative_algorithm=algorithm, speculative_num_draft_tokens=rows)
    free = int(gib * GIB)
    memory_flags.fill(args, FLASH, free)
    found = plan.plan_memory(FLASH, 8, free, Wishes(), drafts)
    assert memory_report.load_of(args, FLASH, args.context_length) == found.load
    weights = memory_budget.checkpoint_weights(FLASH, 8, drafts)
    for context in (memory_budget.CONTEXT_LEAST, memory_budget.CONTEXT_MOST):
        available = free - context - memory_budget.FRAGMENTS
        most = memory_budget.most_pages(found.load, weights, available)
        pages = memory_report.choose_pages(None, most, memory_budget.useful_pages(found.load))
        budget = memory_budget.budget(found.load, weights, pages)
        if context == memory_budget.CONTEXT_MOST:
            assert budget == found.budget
        assert budget.tokens >= found.budget.tokens


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    free=st.integers(6 * GIB, 20 * GIB),
    more=st.integers(0, 4 * GIB),
    drafts=st.booleans(),
    requests=st.integers(1, 8),
)
def test_more_memory_never_gives_fewer_tokens(free, more, drafts, requests):
    wishes = SIZES._replace(requests=requests, context=131072)
    less, larger = (
        plan.plan_memory(MINI, 1, size, wishes, drafts).budget for size in (free, free + more)
    )
    assert less.tokens <= larger.tokens
    assert less.total <= free - plan.UNSEEN


def test_a_card_that_holds_it_only_just_is_named(capsys):
    argv = ("flash", "--cards", "8", "--memory", "22", "--context", "512", "--requests", "1")
    assert "That is tight" in run(capsys, *argv)
    assert "That is tight" not in run(capsys, *argv[:4], "23.5", *argv[5:])


def test_drafts_and_requests_cost_tokens():
    def tokens(drafts: bool, requests: int) -> int:
        wishes = SIZES._replace(requests=requests, context=65536)
        return plan.plan_memory(RANK, 1, int(23.5 * GIB), wishes, drafts).budget.tokens

    assert tokens(True, 4) < tokens(False, 4)
    assert tokens(True, 8) < tokens(True, 4)


def run(capsys, *argv: str) -> str:
    assert cli.main(["plan", *argv]) == 0
    return capsys.readouterr().out


def test_eight_cards_of_24_gb_hold_flash_with_its_draft(capsys):
    said = json.loads(run(capsys, "flash", "--cards", "8", "--card", "4090", "--json"))
    assert said["fits"]
    assert said["planned"]["draft"] > GIB
    assert said["requests"] == 8
    assert said["planned"]["tokens"] >= 100_000
    assert said["planned"]["total"] + plan.UNSEEN <= said["free"]
    text = run(capsys, "flash", "--cards", "8", "--card", "4090")
    assert f"Memory of each card: {said['planned']['tokens']:,} tokens, 8 requests" in text
    assert (
        "dspark serve --model-path DIR --tp-size 8 --speculative-algorithm dspark "
        f"--max-running-requests 8 --context-length {said['context']} "
        f"--chunked-prefill-size {said['prompt_rows']}\n"
    ) in text
    assert "Projection of a decode step, not a measurement:" in text
    assert all(f"  - {line}\n" in text + "\n" for line in said["assumptions"])


def test_what_is_given_is_kept_and_printed(capsys, tiny_checkpoint):
    argv = (str(tiny_checkpoint), "--memory", "2", "--context", "512", "--requests", "3")
    text = run(capsys, *argv, "--no-draft")
    assert (
        f"dspark serve --model-path {tiny_checkpoint} --tp-size 1 --max-running-requests 3 "
        "--context-length 512" in text
    )
    assert "Projection" not in text  # of a card whose bandwidth nobody named


def test_a_config_file_is_enough(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(presets.tiny()))
    assert "Fits on 2 cards" in run(capsys, str(file), "--cards", "2", "--memory", "4")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["flash", "--cards", "4", "--card", "4090"], "needs 41.22 GiB on each card (weights"),
        (["flash", "--cards", "4", "--card", "4090"], "but 23.50 GiB are free"),
        (["flash", "--cards", "3", "--memory", "24"], "size 3 does not divide o_groups 8"),
        (["tiny", "--memory", "2", "--context", "9999"], "--context-length 9999 is longer"),
        (["nowhere", "--memory", "2"], "nowhere is neither a checkpoint directory"),
    ],
)
def test_what_does_not_fit_is_one_sentence(capsys, argv, said):
    with pytest.raises(UsageError) as refused:
        cli.main(["plan", *argv])
    message = str(refused.value)
    assert said in message
    assert "\n" not in message
    assert message.endswith(".")
    assert cli.main(["plan", *argv, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert said in found["reason"]


def test_a_draft_must_be_there(tmp_path):
    file = tmp_path / "config.json"
    config = presets.tiny()
    del config["dspark_block_size"]
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="holds no DSpark draft"):
        cli.main(["plan", str(file), "--memory", "4", "--draft"])
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        cli.main(["plan", str(file), "--memory", "4"])


@pytest.mark.parametrize("argv", [[], ["--memory", "0"], ["--memory", "2", "--cards", "0"]])
def test_bad_arguments_are_refused(argv):
    with pytest.raises(SystemExit):
        cli.main(["plan", "tiny", *argv])


def test_named_cards_are_served_and_one_is_warned_of(capsys):
    for card in CARDS.values():
        known = capabilities.look_up(card.capability)
        assert known.standing is not capabilities.Standing.REFUSED
    assert cli.main(["plan", "tiny", "--card", "5090"]) == 0
    assert "12.0 (RTX 5090, RTX PRO 6000), which every kernel compiles for" in (
        capsys.readouterr().err
    )


def test_the_projection_is_fitted_to_the_recorded_steps():
    """Within a tenth on the machine that it was fitted to; its launches are the recorded ones."""
    record = json.loads(RECORD.read_text())
    for step in record["steps"]:
        found = plan.plan_memory(RANK, 1, 139 * GIB, SIZES, drafts=False)
        load = found.load._replace(verify_width=step["rows"])
        plain = load._replace(config=without_draft())
        projected = projection.step(plain, 4800e9, 1, record_context(record))
        measured = step["flash_43_layers_and_head"]["microseconds"] / 1e6
        assert projected.seconds == pytest.approx(measured, rel=0.1)
        counted = {int(k.split()[-1]): v for k, v in launches_of(step).items()}
        assert counted == projection.LAUNCHES
        total = step["flash_43_layers_and_head"]["triton_launches"]
        layers = sum(projection.LAUNCHES[ratio] for ratio in RANK.compress_ratios)
        assert layers + projection.OUTSIDE == total


def without_draft() -> ModelConfig:
    config = presets.full_rank()
    del config["dspark_block_size"]
    return ModelConfig.from_hf(config)


def record_context(record: dict) -> int:
    return record["steps"][0]["context"]


def launches_of(step: dict) -> dict[str, int]:
    return {name: layer["triton_launches"] for name, layer in step["layer"].items()}


def test_the_bytes_of_a_step_by_hand():
    """One row of TINY reads two of eight experts of each layer and everything else once."""
    table = {
        "embed.weight": projection.TensorSpec("BF16", (512, 128)),
        "layers.0.ffn.experts.0.w1.weight": projection.TensorSpec("I8", (128, 64)),
        "layers.0.attn.wkv.weight": projection.TensorSpec("F8_E4M3", (512, 128)),
    }
    assert projection.held(table, 1) == (128 * 64, 512 * 128)
    assert projection.held(table, 2) == (128 * 64 / 2, 512 * 128)
    read = projection.weights_read(projection.held(table, 1), TINY, 1)
    assert read == 512 * 128 + 128 * 64 / 4
    assert projection.experts_touched(TINY, 2) == 1 - (6 / 8) ** 2


def test_a_sum_by_hand():
    hidden = FLASH.hidden_size
    assert projection.sum_over_ranks(FLASH, 1, 6) == 0
    assert projection.sum_over_ranks(FLASH, 8, 1) == 40e-6 + 7 * 2 * hidden / 6e9
    assert projection.sum_over_ranks(FLASH, 8, GATHERED_ROWS + 1) == pytest.approx(
        2 * (40e-6 + 7 * (GATHERED_ROWS + 1) * 2 * hidden / 8 / 6e9)
    )


def test_slower_cards_and_more_requests_take_longer():
    load = plan.plan_memory(FLASH, 8, int(23.5 * GIB), Wishes(), True).load
    fast, slow, many = (
        projection.step(load, bandwidth, requests, 4096)
        for bandwidth, requests in ((1008e9, 1), (300e9, 1), (1008e9, 8))
    )
    assert fast.seconds < slow.seconds
    assert fast.read == slow.read < many.read
    assert fast.seconds < many.seconds
