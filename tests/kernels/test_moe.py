"""Routing and MXFP4 expert references against tables, fp64 formulas and transformers."""

import pytest
import torch
import torch.nn.functional as F
from weight_cases import assert_rows_invariant, generator, random_experts, random_route, random_rows

from dspark.kernels.linear import swiglu
from dspark.kernels.moe import Route, dequantise_mxfp4, moe_mxfp4, prepare_experts, route
from dspark.kernels.moe.words import streamed

LIMIT = 10.0


def test_e2m1_codes_times_e8m0_scales():
    """All sixteen codes under the scale bytes where decoders go wrong."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(32) % 16
    packed = (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8)
    for byte in (0, 1, 126, 127, 128, 254):
        scale = 0.0 if byte == 0 else 2.0 ** (byte - 127)
        got = dequantise_mxfp4(packed.view(1, 16), torch.tensor([[byte]], dtype=torch.uint8))
        want = [m * scale for m in magnitudes + [-m for m in magnitudes]] * 2
        assert got[0].tolist() == want
        assert torch.signbit(got[0, 8])  # code 8 is -0


def test_low_nibble_is_the_even_column():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low nibble 2 -> 1.0, high nibble 7 -> 6.0
    got = dequantise_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert got[0, :3].tolist() == [1.0, 6.0, 0.0]


def test_route_by_hand():
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 1.0]])
    got = route(logits, None, None, torch.tensor([5]), 2, 1.5)
    assert got.experts.tolist() == [[1, 3]]
    torch.testing.assert_close(got.weights, torch.tensor([[0.75, 0.75]]))


def test_route_ties_take_the_smaller_id_and_bias_only_selects():
    logits = torch.zeros(1, 6)
    assert route(logits, None, None, torch.tensor([0]), 3, 1.0).experts.tolist() == [[0, 1, 2]]
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 9.0])
    got = route(logits, bias, None, torch.tensor([0]), 2, 1.0)
    assert got.experts.tolist() == [[3, 5]]
    assert got.weights.tolist() == [[0.5, 0.5]]
    raw = route(logits, bias, None, torch.tensor([0]), 2, 1.0, renormalise=False)
    torch.testing.assert_close(raw.weights, F.softplus(torch.zeros(1, 2)).sqrt())


def test_hash_layers_take_the_table_and_learned_weights():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(2, 1)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    got = route(logits, None, table, torch.tensor([0, 1]), 2, 1.5)
    assert got.experts.tolist() == [[0, 3], [1, 2]]
    score = F.softplus(logits[0].double()).sqrt()
    want = torch.stack([score[[0, 3]] / score[[0, 3]].sum(), score[[1, 2]] / score[[1, 2]].sum()])
    torch.testing.assert_close(got.weights, (want * 1.5).float())


def test_padded_rows_choose_no_expert():
    got = route(torch.zeros(2, 4), None, None, torch.tensor([0, -1]), 2, 1.5)
    assert got.experts.tolist() == [[0, 1], [-1, -1]]
    assert got.weights.tolist() == [[0.75, 0.75], [0.0, 0.0]]
    table = torch.zeros(3, 2, dtype=torch.int32)
    assert route(torch.zeros(1, 4), None, table, torch.tensor([-1]), 2, 1.5).experts[0, 0] == -1


def test_swiglu_clamps_gate_above_only_and_up_on_both_sides():
    gate_up = torch.tensor([[50.0, -50.0, 1.0, 2.0, -70.0, 99.0]])
    got = swiglu(gate_up, LIMIT, out_dtype=torch.float32)
    silu = F.silu(torch.tensor([10.0, -50.0, 1.0]))
    torch.testing.assert_close(got[0], silu * torch.tensor([2.0, -10.0, 10.0]))


def literal_moe(x, experts, chosen, limit, shared, served):
    """One row, one expert at a time, f64."""
    out = torch.zeros(x.shape[0], x.shape[1], dtype=torch.float64)
    for row, (weights, ids) in enumerate(zip(chosen.weights, chosen.experts, strict=True)):
        for weight, expert in zip(weights.double(), ids.tolist(), strict=True):
            if expert < 0:
                continue
            gate, up = (experts.dense13[expert] @ x[row].double()).chunk(2)
            h = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            h = h.bfloat16().double() if served else h
            out[row] += weight * (experts.dense2[expert] @ h)
    return out if shared is None else out + shared.double()


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_moe_matches_the_literal_loop(rows):
    experts, x = random_experts(8, 64, 32), random_rows(rows, 64)
    chosen, shared = random_route(rows, 8, 2), random_rows(rows, 64, seed=5).float()
    got = moe_mxfp4(x, experts, chosen, LIMIT, shared)
    want = literal_moe(x, experts, chosen, LIMIT, shared, served=True)
    assert torch.equal(got, want.bfloat16())
    oracle = moe_mxfp4(x.float(), experts, chosen, LIMIT, None)
    want = literal_moe(x, experts, chosen, LIMIT, None, served=False)
    torch.testing.assert_close(oracle.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hashed", [False, True])
def test_agrees_with_hf_deepseek_v4(hashed):
    """A whole sparse block of transformers' DeepseekV4 in full precision."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        vocab_size=16,
        hidden_size=64,
        num_hidden_layers=1,
        moe_intermediate_size=32,
        num_local_experts=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        mlp_layer_types=["hash_moe" if hashed else "moe"],
    )
    block = modeling.DeepseekV4SparseMoeBlock(config, 0)
    experts, rows, g = random_experts(8, 64, config.moe_intermediate_size), 7, generator(11)
    x, ids = torch.randn(1, rows, 64, generator=g), torch.randint(0, 16, (rows,), generator=g)
    with torch.no_grad():
        block.gate.weight.copy_(torch.randn(8, 64, generator=g) * 0.2)
        block.experts.gate_up_proj.copy_(experts.dense13)
        block.experts.down_proj.copy_(experts.dense2)
        for parameter in block.shared_experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.2)
        if hashed:
            picks = [torch.randperm(8, generator=g)[:2] for _ in range(16)]
            block.gate.tid2eid.copy_(torch.stack(picks))
        else:
            block.gate.e_score_correction_bias.copy_(torch.randn(8, generator=g) * 0.1)
        want = block(x, ids.unsqueeze(0))[0]
        shared = block.shared_experts(x)[0]
    chosen = route(
        x[0] @ block.gate.weight.detach().t(),
        None if hashed else block.gate.e_score_correction_bias,
        block.gate.tid2eid.int() if hashed else None,
        ids,
        2,
        config.routed_scaling_factor,
    )
    got = moe_mxfp4(x[0], experts, chosen, config.swiglu_limit, shared)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * want.abs().max().item())


def test_rows_are_batch_invariant():
    experts, x, chosen = random_experts(8, 64, 32), random_rows(48, 64), random_route(48, 8, 2)
    shared = random_rows(48, 64, seed=5)

    def run(index):
        picked = Route(chosen.weights[index], chosen.experts[index])
        return moe_mxfp4(x[index], experts, picked, LIMIT, shared[index])

    assert_rows_invariant(run, 48)


def test_routes_are_batch_invariant():
    logits = torch.randn(48, 256, generator=generator(9))
    bias = torch.randn(256, generator=generator(8)) * 0.01
    ids = torch.zeros(48, dtype=torch.int64)

    def run(index):
        chosen = route(logits[index], bias, None, ids[index], 6, 1.5)
        return torch.cat((chosen.weights, chosen.experts), 1)

    assert_rows_invariant(run, 48)


def test_padded_and_nan_rows_stay_alone():
    experts, x, chosen = random_experts(4, 64, 32), random_rows(5, 64), random_route(5, 4, 2)
    shared = random_rows(5, 64, seed=5)
    clean = moe_mxfp4(x, experts, chosen, LIMIT, shared)
    x[1], x[3, 0] = float("nan"), float("nan")
    chosen.experts[1], chosen.weights[1] = -1, 0.0
    got = moe_mxfp4(x, experts, chosen, LIMIT, shared)
    assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])
    assert torch.equal(got[1], shared[1])
    assert got[3].isnan().all()
    alone = Route(chosen.weights[1:2], chosen.experts[1:2])
    assert (moe_mxfp4(x[1:2], experts, alone, LIMIT, None) == 0).all()


def test_no_rows():
    experts = random_experts(4, 64, 32)
    none = route(torch.empty(0, 4), None, None, torch.empty(0, dtype=torch.int64), 2, 1.5)
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    assert moe_mxfp4(empty, experts, none, LIMIT, None).shape == (0, 64)


def test_row_chunks_do_not_change_rows():
    experts, x, chosen = random_experts(4, 64, 32), random_rows(300, 64), random_route(300, 4, 2)
    tail = Route(chosen.weights[250:], chosen.experts[250:])
    assert torch.equal(
        moe_mxfp4(x, experts, chosen, LIMIT, None)[250:],
        moe_mxfp4(x[250:], experts, tail, LIMIT, None),
    )


def test_bad_input_is_refused():
    experts = random_experts(4, 64, 32)
    rearranged = streamed(*experts[:4])
    with pytest.raises(ValueError, match="cannot read experts that were rearranged"):
        moe_mxfp4(random_rows(1, 64), rearranged, random_route(1, 4, 2), LIMIT, None)
    bad = experts.s13.clone()
    bad[1, 2, 0] = 255
    with pytest.raises(ValueError, match="byte 255"):
        prepare_experts(experts.w13, bad, experts.w2, experts.s2)
    with pytest.raises(ValueError, match="need s2"):
        prepare_experts(experts.w13, experts.s13, experts.w2, experts.s2[:, :, :0])
    with pytest.raises(ValueError, match="Cannot choose 5"):
        route(torch.zeros(1, 4), None, None, torch.tensor([0]), 5, 1.0)
    with pytest.raises(ValueError, match="fits neither"):
        moe_mxfp4(random_rows(1, 32), experts, random_route(1, 4, 2), LIMIT, None)
