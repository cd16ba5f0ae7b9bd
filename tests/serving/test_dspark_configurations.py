"""The same tokens under every way to run the server: overlap off, other depths,
whole prompts, retraction, capped acceptance, no clearing, a small window pool."""

import pytest
from separated import separate
from serving.conftest import STRICT
from serving.prompts import MIXED, prompt
from serving.test_dspark_identity import FORCED, TOKENS, WISHES
from serving.test_target_only import CHUNKED, RETRACTING, WHOLE, ids, wait_idle

from dspark.commands.local_server import LocalServer
from dspark.speculation import calibration, step_cost, step_timer
from dspark.target.checkpoint.names import draft_tensors, total_bytes
from dspark.target.config import ModelConfig

DSPARK = ("--speculative-algorithm", "DSpark")
PROMPTS = list(MIXED.values())


@pytest.fixture(scope="module")
def truth(serving):
    return ids(serving(CHUNKED).generate_batch(PROMPTS, TOKENS))


def check(server, truth, kinds=("oracle", "wrong", None, "wrong@1"), prompts=PROMPTS):
    """Drafts of several kinds at once; truth: the ids that each prompt must give."""
    parameters = []
    for i, right in enumerate(truth):
        kind = kinds[i % len(kinds)]
        wish = {} if kind is None else {"custom_params": {"draft": kind, "continuation": right}}
        parameters.append(
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": len(right)} | wish
        )
    answers = server.request("/generate", {"input_ids": prompts, "sampling_params": parameters})
    assert [a["output_ids"] for a in answers] == truth
    wait_idle(server)
    assert "Traceback" not in server.log()
    return answers


def test_without_overlap(serving, truth):
    server = serving((*CHUNKED, *DSPARK, "--disable-overlap-schedule"), FORCED)
    check(server, truth)


@pytest.mark.parametrize(
    "depth", [3, *(pytest.param(d, marks=pytest.mark.deep) for d in (1, 2, 4))]
)
def test_fewer_drafts_than_the_block_holds(serving, truth, depth):
    """The block is drafted at its trained width; only `depth` drafts are verified."""
    flags = (*CHUNKED, *DSPARK, "--speculative-dspark-block-size", str(depth))
    server = serving(flags, FORCED)
    answers = check(server, truth)
    section = server.info()["internal_states"][0]["dspark"]
    assert (section["depth"], section["block_size"]) == (depth, 5)
    # The prompt step gives one token; where every draft is right, a verify step depth + 1.
    fewest = min(a["meta_info"]["spec_verify_ct"] for a in answers)
    assert fewest == -(-(TOKENS - 1) // (depth + 1))


def test_whole_prompts_without_prefix_cache_while_retracting(serving, truth):
    check(serving((*WHOLE, *DSPARK), (*FORCED, *RETRACTING)), truth)


def test_a_draft_in_another_directory(tiny, truth, tmp_path):
    """The target's own directory says nothing of a draft; pools are sized for it all the same."""
    target, draft = separate(tiny, tmp_path)
    flags = (*CHUNKED, *DSPARK, "--speculative-draft-model-path", str(draft))
    with LocalServer(target, flags, STRICT | dict(FORCED)) as server:
        check(server, truth)
        section = server.info()["internal_states"][0]["dspark"]
        table = draft_tensors(ModelConfig.from_checkpoint(draft))
        assert section["memory"]["planned"]["draft"] == total_bytes(table)


@pytest.mark.deep
def test_capped_acceptance_and_rejected_rows_kept(serving, truth):
    env = (
        ("DSPARK_FORCED_DRAFTS", "1"),
        ("DSPARK_VERIFY", "cap-accept"),
        ("DSPARK_VERIFY_BUDGET", "11"),
        ("DSPARK_KEEP_REJECTED", "1"),
    )
    server = serving((*CHUNKED, *DSPARK), env)
    check(server, truth)
    section = server.info()["internal_states"][0]["dspark"]
    assert section["verify_mode"] == "cap-accept"
    assert not section["clears_rejected_state"]
    assert section["verify_rows_saved"] == 0  # all of them run


@pytest.mark.deep
def test_window_pages_return_while_a_request_decodes(serving):
    """1,800 tokens in a window pool of a few pages: it must be reused over and over."""
    small = ("--max-total-tokens", "4096", "--swa-full-tokens-ratio", "0.1")
    limits = (*CHUNKED, *small, "--max-running-requests", "1")
    start = prompt(100, seed=77)
    truth = serving(limits).generate(start, 1800).ids
    server = serving((*limits, *DSPARK), FORCED)
    wish = {"custom_params": {"draft": "oracle", "continuation": truth}}
    assert server.generate(start, 1800, **wish).ids == truth
    assert server.generate(start, 1800).ids == truth
    assert wait_idle(server)["num_used_tokens"] == 0


@pytest.mark.deep
@pytest.mark.parametrize("acceptance", ["high", "medium"])
def test_800_tokens_of_8_prompts(serving, acceptance):
    """The model's own drafts at both acceptance settings, then every forced kind."""
    flags = (*CHUNKED, "--max-total-tokens", "16384")
    truth = ids(serving(flags, acceptance=acceptance).generate_batch(PROMPTS, 800))
    server = serving((*flags, *DSPARK), FORCED, acceptance=acceptance)
    assert ids(server.generate_batch(PROMPTS, 800)) == truth
    for kind in ("oracle", "wrong", "random", "wrong@3"):
        parameters = [
            {
                "temperature": 0,
                "ignore_eos": True,
                "max_new_tokens": 800,
                "custom_params": {"draft": kind, "continuation": right},
            }
            for right in truth
        ]
        body = {"input_ids": PROMPTS, "sampling_params": parameters}
        assert [a["output_ids"] for a in server.request("/generate", body, 3600)] == truth, kind


@pytest.mark.deep
def test_calibrated_confidences_and_a_cost_table(serving, tmp_path):
    """Collect samples, fit them, then let both files decide what is verified: same tokens."""
    samples, fitted, cost = (
        tmp_path / n for n in ("samples.jsonl", "calibration.json", "cost.json")
    )
    collecting = serving(
        (*CHUNKED, *DSPARK), (("DSPARK_SAMPLES", str(samples)),), acceptance="medium"
    )
    truth = ids(collecting.generate_batch(PROMPTS, TOKENS))
    logits, accepted = calibration.read_samples(samples)
    assert len(logits) > 50
    assert accepted.unique().numel() > 2
    calibration.save(calibration.fit(logits, accepted, "random prompts"), fitted)
    # A second row doubles the time of a step, so few drafts are worth their rows.
    samples = [step_cost.Sample(r, n, 0.01 * n) for r in (1, 8) for n in range(r, 6 * r + 1)]
    step_cost.save(step_cost.from_samples(samples), cost)
    env = (
        ("DSPARK_VERIFY", "scheduled"),
        ("DSPARK_CALIBRATION", str(fitted)),
        ("DSPARK_STEP_COST", str(cost)),
    )
    server = serving((*CHUNKED, *DSPARK), env, acceptance="medium")
    outputs = server.generate_batch(PROMPTS, TOKENS)
    assert ids(outputs) == truth
    section = server.info()["internal_states"][0]["dspark"]
    assert section["calibrated"]
    assert section["step_cost"] == "given"
    caps = [o.meta["spec_cap_length"] for o in outputs]
    assert 1.0 <= sum(caps) / len(caps) < 5.5  # rows verified a step: fewer than all 6


@pytest.mark.deep
@pytest.mark.parametrize("without", [1, 9], ids=["pausing", "drafting"])
def test_drafting_pauses_beside_every_kind_of_request(serving, tmp_path, without):
    """A draft that makes a step ten times as long, and one that costs a tenth of it."""
    cost = [step_cost.Steps(n, (n, 6 * n), (0.010, 0.011), 0.001 * without) for n in (1, 8)]
    step_cost.save(tuple(cost), tmp_path / "cost.json")
    env = (("DSPARK_VERIFY", "scheduled"), ("DSPARK_STEP_COST", str(tmp_path / "cost.json")))
    server = serving((*CHUNKED, *DSPARK), env, acceptance="medium")
    plain = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 100}
    for logprobs in (False, True):
        body = {
            "input_ids": PROMPTS,
            "sampling_params": [plain | wish for wish in WISHES],
            "return_logprob": logprobs,
        }
        theirs = serving(CHUNKED, acceptance="medium").request("/generate", body)
        ours = server.request("/generate", body)
        assert [a["output_ids"] for a in ours] == [a["output_ids"] for a in theirs]
    section = server.info()["internal_states"][0]["dspark"]
    assert (section["steps_without_draft"] > 100) == (without == 1)


@pytest.mark.deep
def test_a_server_measures_its_steps_at_its_first_start(tiny, truth, tmp_path):
    env = STRICT | {"DSPARK_VERIFY": "scheduled", "XDG_CACHE_HOME": str(tmp_path)}
    for source in ("measured at start", "measured at an earlier start"):
        with LocalServer(tiny, (*CHUNKED, *DSPARK), env) as server:
            section = server.info()["internal_states"][0]["dspark"]
            assert section["step_cost"] == source
            # SGLang's own first request; those of the measurement are forgotten.
            assert section["verify_steps"] < step_timer.steps_of(5)
            assert ids(server.generate_batch(PROMPTS, TOKENS)) == truth
            assert "Traceback" not in server.log()
    (file,) = (tmp_path / "sglang-dspark").iterdir()
    assert {1, 8} <= {steps.requests for steps in step_cost.load(file)}
