"""The target model against HF transformers' `deepseek_v4` fed with the same (dequantised) weights.

Oracle mode runs our formulas in fp32 without activation or cache quantisation, so both sides
compute the same function and differ by rounding only. The layers' real code paths are used:
paged pools, compress rings, step metadata.
"""

from typing import NamedTuple

import pytest
import torch
from oracle_hf import load_oracle
from oracle_served import served_rounding
from transformers import DeepseekV4ForCausalLM, DynamicCache

from dspark.bench.local_target import LocalTarget, Rows
from dspark.kernels.moe import route
from dspark.kernels.step import BatchRows, Bounds, Rings, step_meta
from dspark.target import moe as moe_layer
from dspark.target.attention import Forward
from dspark.target.checkpoint.make import ACCEPTANCE, make_checkpoint
from dspark.target.checkpoint.presets import PRESETS
from dspark.target.config import ModelConfig
from dspark.target.model import run_layers
from dspark.target.weights import TargetWeights, load_target

PREFILL_LENGTHS = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, *range(125, 132)]
PREFILL_LENGTHS += [*range(253, 260), 385, *range(509, 516)]
DECODE_STEPS = 64


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


class Tiny(NamedTuple):
    config: ModelConfig
    weights: TargetWeights
    hf: DeepseekV4ForCausalLM


def make_tiny(directory, acceptance: str) -> Tiny:
    make_checkpoint(directory, PRESETS["tiny"](), alpha=ACCEPTANCE[acceptance])
    config = ModelConfig.from_checkpoint(directory)
    return Tiny(config, load_target(directory, config), load_oracle(directory))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    """Every layer counts fully here, so that an error in any of them reaches the logits."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", "none")


@pytest.fixture(scope="module")
def tokens(tiny):
    generator = torch.Generator().manual_seed(5)
    longest = max(PREFILL_LENGTHS) + DECODE_STEPS
    return torch.randint(2, tiny.config.vocab_size - 1, (longest,), generator=generator).tolist()


@pytest.fixture(scope="module")
def hf_logits(tiny, tokens):
    """[longest, vocab] logits of one HF prefill: causal, so it holds those of every prefix."""
    with torch.no_grad():
        return tiny.hf(torch.tensor([tokens])).logits[0]


def oracle(tiny, **kwargs) -> LocalTarget:
    return LocalTarget(tiny.weights, tiny.config, max_tokens=640, dtype=torch.float32, **kwargs)


@pytest.mark.parametrize("length", PREFILL_LENGTHS)
def test_prefill_logits_match_hf(tiny, tokens, hf_logits, length):
    model = oracle(tiny)
    out = model.forward([Rows(0, 0, tokens[:length])], store_all=False)
    assert relative_error(model.logits(out.hidden), hf_logits[:length]) < 2e-5


@pytest.mark.parametrize("length", [1, 7, 126, 255, 510])
def test_decode_logits_match_hf_for_64_steps(tiny, tokens, hf_logits, length):
    model = oracle(tiny)
    model.forward([Rows(0, 0, tokens[:length])], store_all=False)
    for position in range(length, length + DECODE_STEPS):
        out = model.forward([Rows(0, position, tokens[position : position + 1])])
        assert relative_error(model.logits(out.hidden), hf_logits[position : position + 1]) < 2e-5


def test_hf_decode_with_its_own_cache_agrees_with_its_prefill(tiny, tokens, hf_logits):
    """Guards the oracle: one HF prefill may stand for its incremental decode."""
    cache = DynamicCache(config=tiny.hf.config)
    with torch.no_grad():
        tiny.hf(torch.tensor([tokens[:126]]), past_key_values=cache, use_cache=True)
        for position in range(126, 134):
            step = tiny.hf(
                torch.tensor([tokens[position : position + 1]]),
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
            assert relative_error(step, hf_logits[position : position + 1]) < 2e-5


@pytest.mark.parametrize("chunk", [1, 16, 64, 131])
def test_chunked_prefill_is_bit_equal_to_one_chunk(tiny, tokens, chunk):
    prompt = tokens[:300]
    whole = LocalTarget(tiny.weights, tiny.config, max_tokens=512)
    expected = whole.forward([Rows(0, 0, prompt)], store_all=False).hidden
    pieces = LocalTarget(tiny.weights, tiny.config, max_tokens=512)
    start = 0 if chunk > 1 else 290
    if start:
        pieces.forward([Rows(0, 0, prompt[:start])], store_all=False)
    got = [
        pieces.forward([Rows(0, a, prompt[a : min(a + chunk, 300)])], store_all=False).hidden
        for a in range(start, 300, chunk)
    ]
    assert torch.cat(got).equal(expected[start:])


def test_rows_do_not_depend_on_their_neighbours(tiny, tokens):
    """Three sequences in one forward give each the bits it gets alone (prefill and verify)."""
    lengths = [5, 130, 260]
    together = LocalTarget(tiny.weights, tiny.config, max_tokens=512, sequences=3, verify_width=6)
    prefill = together.forward(
        [Rows(i, 0, tokens[:n]) for i, n in enumerate(lengths)], store_all=False
    )
    verify = together.forward([Rows(i, n, tokens[n : n + 6]) for i, n in enumerate(lengths)])
    at = 0
    for i, n in enumerate(lengths):
        alone = LocalTarget(tiny.weights, tiny.config, max_tokens=512, verify_width=6)
        out = alone.forward([Rows(0, 0, tokens[:n])], store_all=False)
        assert out.hidden.equal(prefill.hidden[at : at + n])
        at += n
        for j in range(6):  # one token at a time equals the six verify rows
            step = alone.forward([Rows(0, n + j, tokens[n + j : n + j + 1])])
            assert step.hidden[0].equal(verify.hidden[i * 6 + j])


@pytest.mark.parametrize("run", [[2, 6, 1], [6, 0, 3], [1, 1, 1]])
def test_rows_beyond_the_run_choose_no_experts_and_change_no_other(tiny, tokens, run, monkeypatch):
    """Verify rows in a fixed width give the bits of the packed rows; the rest goes to no expert."""
    lengths, width = [5, 130, 260], 6
    ids = [tokens[n : n + width] for n in lengths]

    def started():
        made = LocalTarget(
            tiny.weights, tiny.config, max_tokens=512, sequences=3, verify_width=width
        )
        made.forward([Rows(i, 0, tokens[:n]) for i, n in enumerate(lengths)], store_all=False)
        return made

    packed = started().forward([Rows(i, lengths[i], ids[i][:n]) for i, n in enumerate(run)])

    chosen = []
    monkeypatch.setattr(moe_layer, "route", lambda *args: chosen.append(route(*args)) or chosen[-1])
    model = started()
    chosen.clear()
    meta = step_meta(
        BatchRows(torch.tensor([1, 2, 3]), torch.tensor(lengths), torch.tensor(run), 18, width),
        model.tables,
        Bounds(tiny.config.sliding_window, model.max_pages, model.max_pages * 2),
        Rings(model.geometry.c4.ring, model.geometry.c128.ring),
        store_all=True,
    )
    flat = torch.tensor(ids).flatten()
    embedded = tiny.weights.embed[flat].to(torch.bfloat16)
    forward = Forward(meta, True, model.rope, model.caches)
    padded = run_layers(embedded, flat, tiny.weights, tiny.config, forward)

    runs = (torch.arange(width) < torch.tensor(run)[:, None]).flatten()
    assert padded.hidden[runs].equal(packed.hidden)
    assert len(chosen) == len(tiny.weights.blocks)
    for routed in chosen:
        assert (routed.experts >= 0).all(1).equal(runs)
        assert (routed.experts[~runs] == -1).all()


# HF in fp32 does not round to bf16 between ops. Logits (standard deviation 5.6) then differ by
# 0.03 rms, so a smaller gap between HF's two best tokens decides nothing.
CLEAR_MARGIN = 0.1


def test_greedy_ids_match_hf_wherever_its_margin_is_clear(tmp_path, tokens):
    """Served precision (W8A8, MXFP4, fp8 cache) against HF rounding its inputs and keys alike."""
    tiny = make_tiny(tmp_path / "checkpoint", "high")
    model = LocalTarget(tiny.weights, tiny.config, max_tokens=512)
    compared = skipped = 0
    for length in (3, 64, 126, 255, 300):
        ids = model.greedy(tokens[:length], 24)
        with torch.no_grad(), served_rounding(tiny.hf):
            rows = tiny.hf(torch.tensor([tokens[:length] + ids])).logits[0, length - 1 : -1]
        best = rows.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > CLEAR_MARGIN
        assert torch.tensor(ids)[clear].equal(best.indices[clear, 0])
        compared, skipped = compared + int(clear.sum()), skipped + int((~clear).sum())
    print(f"greedy ids against HF: {compared} compared, {skipped} skipped")
    assert compared > 100
