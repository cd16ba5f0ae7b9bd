"""The training forward computes what is served, and a few steps of every phase run."""

import json
from pathlib import Path

import pytest
import torch

from dspark.bench.local_target import LocalTarget, Rows
from dspark.bench.train_embedded import config as presets
from dspark.bench.train_embedded.__main__ import main
from dspark.bench.train_embedded.acceptance import Blocks, _walk
from dspark.bench.train_embedded.attention import build_ropes
from dspark.bench.train_embedded.corpus import train_tokenizer
from dspark.bench.train_embedded.draft import markov_heads, run_draft
from dspark.bench.train_embedded.evaluate import calibrate
from dspark.bench.train_embedded.export import export
from dspark.bench.train_embedded.generate import generate
from dspark.bench.train_embedded.linear import EXACT
from dspark.bench.train_embedded.losses import draft_loss
from dspark.bench.train_embedded.optimise import orthogonalise
from dspark.bench.train_embedded.parameters import init_draft, init_target, prepare
from dspark.bench.train_embedded.quantise import fp8_rows, fp8_weight, mxfp4_weight
from dspark.bench.train_embedded.sinkhorn import sinkhorn
from dspark.bench.train_embedded.target import logits, run_target
from dspark.kernels.linear.reference import dequantise_fp8
from dspark.kernels.moe.reference import dequantise_mxfp4
from dspark.kernels.step import BlockRows, draft_meta
from dspark.speculation import calibration
from dspark.target.caches import LayerCaches
from dspark.target.checkpoint.formats import encode_fp8, encode_mxfp4
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, block_ids, inject, run_block
from dspark.target.weights import load_draft, load_target

LENGTH = 256
GAMMA = 5


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(presets.tiny())


def randomised(weights: dict, seed: int) -> dict:
    """Tensors that start at zero would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(w.shape, generator=generator) * 0.05
        if w.is_floating_point() and not w.any()
        else w.detach()
        for n, w in weights.items()
    }


@pytest.fixture(scope="module")
def masters(config) -> dict:
    return randomised(init_target(config, 0), 1) | randomised(init_draft(config, 2), 3)


@pytest.fixture(scope="module")
def checkpoint(masters, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    tokenizer = folder / "source.json"
    tokenizer.write_text(train_tokenizer(["x = 1\n"] * 4, 384).to_str())
    export(folder / "model", presets.tiny(), masters, tokenizer)
    return folder / "model"


@pytest.fixture(scope="module")
def ids(config) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(config.vocab_size, (1, LENGTH), generator=generator)


@pytest.fixture(scope="module")
def prepared(masters) -> dict:
    return prepare(masters, EXACT, quantised=True)


@pytest.fixture(scope="module")
def trained_side(prepared, ids, config):
    ropes = build_ropes(config, LENGTH + GAMMA, torch.device("cpu"))
    return run_target(prepared, ids, ropes, config, EXACT, dense=torch.tensor(False))


@pytest.fixture(scope="module")
def served(checkpoint, config, ids):
    target = LocalTarget(
        load_target(checkpoint, config),
        config,
        max_tokens=512,
        dtype=torch.float32,
        capture_layers=frozenset(config.dspark.target_layer_ids),
    )
    return target, target.forward([Rows(0, 0, ids[0].tolist())], store_all=False)


def test_target_forward_equals_the_served_model(trained_side, served):
    _, output = served
    torch.testing.assert_close(trained_side.hidden[0], output.hidden, rtol=1e-3, atol=1e-3)
    captures = torch.cat(output.captures, dim=-1)
    torch.testing.assert_close(trained_side.captures[0], captures, rtol=1e-3, atol=1e-3)


def test_draft_forward_equals_the_served_draft(
    trained_side, served, checkpoint, prepared, ids, config
):
    target, _ = served
    weights = load_draft(checkpoint, config)
    anchor = 180
    bonus = ids[:, anchor : anchor + 1]
    ropes = build_ropes(config, LENGTH + GAMMA, torch.device("cpu"))
    ours = run_draft(
        prepared, prepared, trained_side.captures, bonus, torch.tensor([[anchor]]), ropes, config,
        EXACT,
    )  # fmt: skip
    caches = [LayerCaches(window=torch.full((3, 256 * 512), float("nan"))) for _ in weights.blocks]
    meta = draft_meta(
        BlockRows(torch.tensor([1]), torch.tensor([anchor]), torch.tensor([0]), GAMMA),
        target.tables,
        window=config.sliding_window,
    )
    positions = torch.arange(anchor)
    window_slot = target.tables.token_slot[1, :anchor]
    inject(
        trained_side.captures[0, :anchor],
        window_slot,
        positions,
        weights,
        config,
        target.rope.plain,
        caches,
    )
    block = block_ids(bonus[0], GAMMA, config.dspark.noise_token_id)
    embedded = target.weights.embed[block].float()
    forward = DraftForward(meta, target.rope.plain, caches)
    theirs = run_block(embedded, block, weights, target.weights.head, config, forward)
    torch.testing.assert_close(ours.hidden[0, 0], theirs.hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.base[0, 0], theirs.logits, rtol=1e-3, atol=1e-3)


def test_markov_heads_by_hand(prepared, trained_side, ids, config):
    ropes = build_ropes(config, LENGTH + GAMMA, torch.device("cpu"))
    anchors = torch.tensor([[40, 200]])
    drafted = run_draft(
        prepared, prepared, trained_side.captures, ids.gather(1, anchors), anchors, ropes, config,
        EXACT,
    )  # fmt: skip
    previous = torch.tensor([[[7, 1, 2, 3, 4], [9, 8, 7, 6, 5]]])
    heads = markov_heads(prepared, drafted, previous, slice(None))
    w1, w2 = (prepared[f"mtp.1.markov_head.markov_w{i}"] for i in (1, 2))
    proj = prepared["mtp.1.confidence_head.proj"][0]
    logit = drafted.base[0, 1, 2] + w2 @ w1[7]
    confidence = proj @ torch.cat((drafted.hidden[0, 1, 2], w1[7]))
    torch.testing.assert_close(heads.logits[0, 1, 2], logit, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(heads.confidence[0, 1, 2], confidence, rtol=1e-4, atol=1e-4)


def test_cached_decoding_continues_as_the_whole_forward_does(prepared, ids, config):
    ropes = build_ropes(config, LENGTH, torch.device("cpu"))
    out = generate(
        prepared, ids[:, :240], LENGTH, torch.zeros(1), ropes, config, EXACT, torch.Generator()
    )
    whole = run_target(prepared, out, ropes, config, EXACT, dense=torch.tensor(False))
    assert torch.equal(logits(whole.hidden, prepared).argmax(-1)[:, 239:-1], out[:, 240:])


def test_weight_rounding_is_what_the_exporter_writes():
    weight = torch.randn(200, 160, generator=torch.Generator().manual_seed(5)) * 0.1
    weight[:128, :128] *= 300
    fp8 = encode_fp8(weight)
    scales = torch.exp2(fp8.scales.float() - 127)
    assert torch.equal(fp8_weight(weight), dequantise_fp8(fp8.codes, scales).float())
    fp4 = encode_mxfp4(weight)
    assert torch.equal(mxfp4_weight(weight), dequantise_mxfp4(fp4.packed, fp4.scales).float())


def test_rounding_of_ties_zeros_and_gradients():
    ties = torch.zeros(1, 32)
    ties[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])
    rounded = mxfp4_weight(ties)
    assert rounded[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0]
    x = torch.randn(3, 200, requires_grad=True)
    fp8_rows(x, 128).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert (fp8_rows(x, 128) - x).abs().max() <= x.abs().max() / 16


def test_sinkhorn_gradient_equals_unrolled_autograd():
    generator = torch.Generator().manual_seed(6)
    x = (torch.randn(9, 4, 4, generator=generator) * 2).requires_grad_()
    weight = torch.randn(9, 4, 4, generator=generator)
    a = x.softmax(-1) + 1e-6
    a = a / (a.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        a = a / (a.sum(2, keepdim=True) + 1e-6)
        a = a / (a.sum(1, keepdim=True) + 1e-6)
    (expected,) = torch.autograd.grad((a * weight).sum(), x)
    ours = sinkhorn(x, 20, 1e-6)
    (gradient,) = torch.autograd.grad((ours * weight).sum(), x)
    torch.testing.assert_close(ours, a)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_orthogonalise_brings_singular_values_near_one():
    x = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(7))
    singular = torch.linalg.svdvals(orthogonalise(x))
    assert 0.6 < singular.min() <= singular.max() < 1.3


def test_draft_loss_of_a_perfect_draft_is_its_entropy():
    generator = torch.Generator().manual_seed(8)
    scores = torch.randn(2, 3, 5, 11, generator=generator)
    labels = torch.randint(11, (2, 3, 5), generator=generator)
    loss = draft_loss(scores, scores, labels, torch.full((2, 3, 5), 30.0))
    assert loss.distance < 1e-5
    assert loss.confidence < 1e-5  # certain, and rightly so
    assert torch.equal(loss.agreement, torch.ones(5))
    nll = -scores.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weight = torch.exp(-torch.arange(5) / 4)
    expected = (nll * weight).sum(-1).mean() / weight.sum()
    torch.testing.assert_close(loss.cross_entropy, expected)


def test_calibration_of_a_mixture_is_judged_on_blocks_it_was_not_fitted_to():
    """Even blocks say 0.5 where half are accepted; odd blocks say the same and all are."""
    logits = torch.zeros(400, 1)
    accepted = torch.ones(400, dtype=torch.int64)
    accepted[0::4] = 0  # half of the even ones
    fitted = calibrate({"text": Blocks(accepted, logits)})
    assert fitted.num_samples == 200
    assert fitted.ece_before == fitted.ece_after == (0.5,)


def test_walk_moves_on_by_accepted_plus_one():
    assert _walk([0, 2, 5, 5, 1, 0, 0, 3]) == [0, 1, 4, 6, 7]


def test_every_phase_runs_and_resumes(tmp_path):
    arguments = ["--tiny", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main(["all", *arguments]) == 0
    report = json.loads((tmp_path / "out/acceptance.json").read_text())
    assert {"heldout_code T=0", "heldout_prose T=1"} <= set(report)
    assert len(calibration.load(tmp_path / "out/confidence.json", gamma=5).ece_after) == 5
    lines = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert any(line.get("done") and line["step"] == 3 for line in lines)
    before = (tmp_path / "out/draft-0.safetensors").read_bytes()
    assert main(["draft", "--resume", *arguments]) == 0  # nothing left to do
    assert (tmp_path / "out/draft-0.safetensors").read_bytes() == before
