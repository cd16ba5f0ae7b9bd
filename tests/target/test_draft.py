"""The draft against a direct fp64 transcription of its formulas, from the checkpoint's own tensors.

Oracle mode (fp32, no quantiser) on both sides, so they differ by rounding only. The transcription
shares nothing with the product but the number formats of the checkpoint.
"""

import pytest
import torch
from safetensors.torch import load_file

from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.draft import confidence, markov_block
from dspark.kernels.linear import dequantise_fp8
from dspark.kernels.moe import route
from dspark.kernels.moe.reference import dequantise_mxfp4
from dspark.kernels.step import BlockRows, DraftMeta, Tables, draft_meta
from dspark.target import moe as moe_layer
from dspark.target.caches import LayerCaches
from dspark.target.config import ModelConfig
from dspark.target.draft import DraftForward, block_ids, inject, project, run_block
from dspark.target.rope import rope_table
from dspark.target.weights import load_draft, load_target

F64 = torch.float64


class Formulas:
    """The draft written out: no pools, no batching, fp64."""

    def __init__(self, directory, config: ModelConfig):
        self.config, self.tensors = config, {}
        for shard in sorted(directory.glob("*.safetensors")):
            self.tensors |= load_file(shard)
        self.stages = config.dspark.stages
        self.last = f"mtp.{self.stages - 1}."

    def weight(self, name: str) -> torch.Tensor:
        values = self.tensors[f"{name}.weight"]
        if f"{name}.scale" not in self.tensors:
            return values.to(F64)
        scale = self.tensors[f"{name}.scale"].view(torch.uint8)
        if values.dtype == torch.float8_e4m3fn:
            return dequantise_fp8(values, decode_e8m0(scale)).to(F64)
        return dequantise_mxfp4(values.view(torch.uint8), scale).to(F64)

    def f32(self, name: str) -> torch.Tensor:
        return self.tensors[name].to(F64)

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight(name)

    def rotate(self, x, pos, sign=1.0):
        """Last 64 dims, interleaved pairs, theta 1e4. x: [n, ..., 512]."""
        angle = pos.to(F64)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2, dtype=F64) / 64)
        while angle.dim() < x.dim():
            angle = angle.unsqueeze(1)
        even, odd = x[..., 448::2], x[..., 449::2]
        out = x.clone()
        out[..., 448::2] = even * angle.cos() - sign * odd * angle.sin()
        out[..., 449::2] = odd * angle.cos() + sign * even * angle.sin()
        return out

    def latents(self, x, stage, pos):
        p = f"mtp.{stage}.attn."
        return self.rotate(self.norm(x @ self.weight(p + "wkv").T, p + "kv_norm"), pos)

    def site(self, streams, prefix, norm, sublayer):
        flat = streams.flatten(1)
        z = flat @ self.f32(prefix + "_fn").T / torch.sqrt((flat * flat).mean(1, True) + 1e-6)
        scale, base = self.f32(prefix + "_scale"), self.f32(prefix + "_base")
        pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
        mix = torch.softmax((z[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + 1e-6
        mix = mix / (mix.sum(1, keepdim=True) + 1e-6)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(2, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(1, keepdim=True) + 1e-6)
        y = sublayer(self.norm(torch.einsum("tj,tjd->td", pre, streams), norm))
        return post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", mix, streams)

    def attention(self, x, stage, pos, window):
        p, heads = f"mtp.{stage}.attn.", self.config.num_attention_heads
        latent = self.norm(x @ self.weight(p + "wq_a").T, p + "q_norm")
        q = (latent @ self.weight(p + "wq_b").T).view(-1, heads, 512)
        q = self.rotate(q / torch.sqrt((q * q).mean(-1, keepdim=True) + 1e-6), pos)
        keys = torch.cat([window, self.latents(x, stage, pos)])
        score = torch.einsum("thd,kd->thk", q, keys) * 512**-0.5
        sink = self.f32(p + "attn_sink")[None, :, None].expand(len(x), -1, 1)
        weight = torch.softmax(torch.cat([score, sink], -1), -1)[..., :-1]
        out = self.rotate(torch.einsum("thk,kd->thd", weight, keys), pos, sign=-1.0)
        groups = self.config.o_groups
        wo_a = self.weight(p + "wo_a").view(groups, self.config.o_lora_rank, -1)
        grouped = torch.einsum("tgi,goi->tgo", out.reshape(len(x), groups, -1), wo_a)
        return grouped.flatten(1) @ self.weight(p + "wo_b").T

    def expert(self, x, name):
        gate = (x @ self.weight(name + ".w1").T).clamp(max=10)
        up = (x @ self.weight(name + ".w3").T).clamp(-10, 10)
        return (gate * torch.sigmoid(gate) * up) @ self.weight(name + ".w2").T

    def experts(self, x, stage):
        p = f"mtp.{stage}.ffn."
        score = torch.sqrt(torch.nn.functional.softplus(x @ self.weight(p + "gate").T))
        chosen = (score + self.f32(p + "gate.bias")).topk(self.config.num_experts_per_tok).indices
        out = self.expert(x, p + "shared_experts")
        for t in range(len(x)):
            weight = score[t, chosen[t]] / score[t, chosen[t]].sum() * 1.5
            for w, e in zip(weight, chosen[t].tolist(), strict=True):
                out[t] += w * self.expert(x[t : t + 1], f"{p}experts.{e}")[0]
        return out

    def project(self, captures):
        return self.norm(captures.to(F64) @ self.weight("mtp.0.main_proj").T, "mtp.0.main_norm")

    def block(self, captures, bonus):
        """captures: of tokens 0..L-1. Returns hidden [gamma, hidden], base logits [gamma, V]."""
        length, gamma = len(captures), self.config.dspark.block_size
        ids = torch.full((gamma,), self.config.dspark.noise_token_id)
        ids[0] = bonus
        pos = torch.arange(length, length + gamma)
        seen, streams = self.project(captures), self.weight("embed")[ids][:, None].repeat(1, 4, 1)
        first = max(0, length - 128)
        for i in range(self.stages):
            window = self.latents(seen, i, torch.arange(length))[first:]
            p = f"mtp.{i}."
            streams = self.site(
                streams,
                p + "hc_attn",
                p + "attn_norm",
                lambda x, i=i, window=window: self.attention(x, i, pos, window),
            )
            streams = self.site(
                streams, p + "hc_ffn", p + "ffn_norm", lambda x, i=i: self.experts(x, i)
            )
        flat = streams.flatten(1)
        z = flat @ self.f32(self.last + "hc_head_fn").T
        z = z / torch.sqrt((flat * flat).mean(1, True) + 1e-6)
        gate = z * self.f32(self.last + "hc_head_scale") + self.f32(self.last + "hc_head_base")
        hidden = torch.einsum("tj,tjd->td", torch.sigmoid(gate) + 1e-6, streams)
        return hidden, self.norm(hidden, self.last + "norm") @ self.weight("head").T

    def refine(self, hidden, base, bonus):
        """Greedy drafts and confidence logits."""
        w1 = self.weight(self.last + "markov_head.markov_w1")
        w2 = self.weight(self.last + "markov_head.markov_w2")
        proj = self.weight(self.last + "confidence_head.proj")[0]
        previous, drafts, trust = bonus, [], []
        for k in range(len(base)):
            trust.append(float(torch.cat([hidden[k], w1[previous]]) @ proj))
            previous = int((base[k] + w1[previous] @ w2.T).argmax())
            drafts.append(previous)
        return drafts, trust


class Setup:
    """The product's draft on fp32 pools: one request in slot 1, pages 1..3."""

    def __init__(self, directory):
        self.config = ModelConfig.from_checkpoint(directory)
        self.gamma = self.config.dspark.block_size
        self.weights = load_draft(directory, self.config)
        target = load_target(directory, self.config)
        self.embed, self.head = target.embed.float(), target.head
        self.rope = rope_table(self.config.rope_theta, 1024, None)
        self.table = torch.zeros(2, 768, dtype=torch.int32)
        self.table[1] = torch.arange(256, 1024)
        self.window_table = torch.arange(1024)
        self.caches = [
            LayerCaches(window=torch.full((4, 256 * 512), float("nan")))
            for _ in self.weights.blocks
        ]

    def meta(self, length: int, padded: int = 0) -> DraftMeta:
        """padded: requests of nobody behind the one."""
        return draft_meta(
            BlockRows(
                torch.tensor([1] + [-1] * padded),
                torch.tensor([length] + [0] * padded),
                torch.zeros(1 + padded, dtype=torch.int64),
                self.gamma,
            ),
            Tables(self.table, self.window_table),
            window=128,
        )

    def inject(self, captures, first=0, keep=None):
        pos = torch.arange(first, first + len(captures))
        window_slot = self.window_table[self.table[1, pos].long()].to(torch.int32)
        if keep is not None:
            window_slot = torch.where(torch.arange(len(captures)) < keep, window_slot, -1).to(
                torch.int32
            )
        inject(captures, window_slot, pos, self.weights, self.config, self.rope, self.caches)

    def block(self, length, bonus, padded=0):
        bonuses = torch.tensor([bonus] * (1 + padded))
        ids = block_ids(bonuses, self.gamma, self.config.dspark.noise_token_id)
        return run_block(
            self.embed[ids],
            ids,
            self.weights,
            self.head,
            self.config,
            DraftForward(self.meta(length, padded), self.rope, self.caches),
        )

    def drafts(self, out, bonus):
        base = out.logits.view(1, self.gamma, -1)
        made = markov_block(
            base, torch.tensor([bonus]), self.weights.markov_w1.float(), self.weights.markov_w2
        )
        followed = torch.cat([torch.tensor([[bonus]]), made.tokens[:, :-1]], 1)
        trust = confidence(
            out.hidden.view(1, self.gamma, -1),
            followed,
            self.weights.markov_w1,
            self.weights.confidence,
            torch.ones(self.gamma),
        )
        return made.tokens[0].tolist(), trust.logit[0]


@pytest.fixture(scope="module")
def formulas(tiny_directory):
    return Formulas(tiny_directory, ModelConfig.from_checkpoint(tiny_directory))


@pytest.fixture
def setup(tiny_directory):
    return Setup(tiny_directory)


@pytest.fixture(scope="module")
def captures():
    return torch.randn(300, 3 * 128, generator=torch.Generator().manual_seed(3))


def close(ours, theirs):
    return float((ours.double() - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("length", [1, 2, 5, 127, 128, 129, 251, 260, 300])
def test_block_matches_the_formulas(setup, formulas, captures, length):
    setup.inject(captures[:length])
    out = setup.block(length, bonus=77)
    hidden, base = formulas.block(captures[:length], 77)
    assert close(out.hidden, hidden) < 1e-5
    assert close(out.logits, base) < 1e-5
    drafts, trust = setup.drafts(out, 77)
    expected, expected_trust = formulas.refine(hidden, base, 77)
    assert drafts == expected
    assert close(trust, torch.tensor(expected_trust, dtype=F64)) < 1e-4


def test_tokens_injected_in_pieces_equal_tokens_injected_at_once(setup, tiny_directory, captures):
    """Chunked prefill, then commits of 1..6 tokens with rejected rows in between."""
    setup.inject(captures[:200])
    whole = setup.block(200, 9)
    pieces = Setup(tiny_directory)
    pieces.inject(captures[:150])
    length = 150
    for commit in (1, 6, 2, 5, 3, 4, 6, 6, 6, 6, 5):
        rejected = torch.full((6 - commit, captures.shape[1]), 7.0)
        pieces.block(length, 9)  # leaves block latents behind
        pieces.inject(torch.cat([captures[length : length + commit], rejected]), length, commit)
        length += commit
    assert length == 200
    assert torch.equal(pieces.block(200, 9).hidden, whole.hidden)


def test_every_row_of_the_block_sees_the_others(setup, captures):
    """Not causal: row 0 changes when a later row's token does."""
    setup.inject(captures[:40])
    plain = setup.block(40, 5).hidden
    noise = setup.config.dspark.noise_token_id
    ids = torch.tensor([5, noise, noise, noise, 11])
    changed = run_block(
        setup.embed[ids],
        ids,
        setup.weights,
        setup.head,
        setup.config,
        DraftForward(setup.meta(40), setup.rope, setup.caches),
    ).hidden
    assert not torch.equal(changed[0], plain[0])


def test_padded_requests_choose_no_experts_and_change_no_other(setup, captures, monkeypatch):
    """A captured graph runs more requests than there are."""
    setup.inject(captures[:40])
    alone = setup.block(40, 9)
    chosen = []
    monkeypatch.setattr(moe_layer, "route", lambda *args: chosen.append(route(*args)) or chosen[-1])
    together = setup.block(40, 9, padded=2)
    assert together.hidden[: setup.gamma].equal(alone.hidden)
    assert together.logits[: setup.gamma].equal(alone.logits)
    real = torch.arange(3 * setup.gamma) < setup.gamma
    for routed in chosen:
        assert (routed.experts >= 0).all(1).equal(real)
    assert len(chosen) == setup.config.dspark.stages


def test_tokens_before_the_window_do_not_count(setup, tiny_directory, captures):
    setup.inject(captures[:300])
    other = Setup(tiny_directory)
    other.inject(torch.cat([captures[:172] + 1, captures[172:300]]))
    assert torch.equal(setup.block(300, 5).hidden, other.block(300, 5).hidden)


def test_large_hidden_states_stay_finite(setup, formulas, captures):
    """A channel at 3e4 must not overflow in the projection, oracle or served."""
    loud = captures[:8].clone()
    loud[:, 17] = 3e4
    exact = formulas.project(loud)
    oracle = project(loud, setup.weights, setup.config)
    served = project(loud.bfloat16(), setup.weights, setup.config)
    assert close(oracle, exact) < 1e-5
    assert served.isfinite().all()
    assert close(served, exact) < 0.1  # activations are e4m3 in served precision
    setup.inject(loud)
    assert setup.block(8, 5).hidden.isfinite().all()


def test_proposal_k_follows_row_k_and_the_proposal_before_it(setup):
    """Row k peaks at 10 + k; the Markov table forbids one successor of 12."""
    vocab, rank = 64, 4
    base = torch.zeros(1, 5, vocab)
    for k in range(5):
        base[0, k, 10 + k] = 5.0
        base[0, k, 30 + k] = 4.0
    w1, w2 = torch.zeros(vocab, rank), torch.zeros(vocab, rank)
    w1[12, 0], w2[13, 0] = 1.0, -9.0  # after 12, 13 costs 9
    from dspark.kernels.linear import prepare_bf16

    block = markov_block(base, torch.tensor([3]), w1, prepare_bf16(w2))
    assert block.tokens[0].tolist() == [10, 11, 12, 33, 14]
