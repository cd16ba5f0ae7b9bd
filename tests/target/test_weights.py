"""Loading: each tensor exactly once, any order, the rank's slice, one sentence per fault."""

import json
import shutil

import pytest
import torch
from oracle_hf import dequantised
from safetensors.torch import load_file, save_file

from dspark.kernels.linear import Fp8Weight
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import make_checkpoint
from dspark.target.checkpoint.names import draft_tensors, target_tensors
from dspark.target.checkpoint.reader import Checkpoint, CheckpointError
from dspark.target.config import ConfigError, ModelConfig
from dspark.target.sharding import check_tp
from dspark.target.weights import load_draft, load_target

INDEX = "model.safetensors.index.json"
TINY = ModelConfig.from_hf(presets.tiny())


def leaves(tree, path=""):
    """Every tensor of nested NamedTuples and lists, with its path."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field in tree._fields:
            yield from leaves(getattr(tree, field), f"{path}.{field}")
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from leaves(item, f"{path}[{i}]")


def assert_same(ours, theirs):
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    assert len(pairs) > 100
    for (path, a), (_, b) in pairs:
        assert a.dtype == b.dtype, path
        assert a.view(torch.uint8).equal(b.view(torch.uint8)), path


@pytest.fixture(scope="module")
def weights(tiny_directory):
    return load_target(tiny_directory, TINY)


@pytest.fixture(scope="module")
def dense(tiny_directory):
    return dequantised(tiny_directory)


@pytest.fixture
def copy(tiny_directory, tmp_path):
    """A private copy to damage."""
    return shutil.copytree(tiny_directory, tmp_path / "copy")


def rewrite(directory, name, change):
    """Apply `change` to the shard holding `name`, as a dict of tensors."""
    shard = directory / Checkpoint(directory).shard_of[name]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] = change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_each_target_tensor_lands_where_the_model_reads_it(weights, dense):
    for i, block in enumerate(weights.blocks):
        at, ratio = f"layers.{i}.", TINY.compress_ratios[i]
        attn, moe = block.attn, block.moe
        for name in ("wkv", "wo_a", "wo_b"):
            assert getattr(attn, name).dense.float().equal(dense[f"{at}attn.{name}.weight"])
        for ours, names in (
            (attn.wqkv_a, ["wq_a", "wkv"]),
            (attn.wq_b, ["wq_b", "indexer.wq_b"] if ratio == 4 else ["wq_b"]),
        ):
            stacked = torch.cat([dense[f"{at}attn.{name}.weight"] for name in names])
            assert ours.dense.float().equal(stacked)
        assert attn.sink.equal(dense[f"{at}attn.attn_sink"])
        assert block.hc_ffn.fn.fn.equal(dense[f"{at}hc_ffn_fn"])
        assert block.hc_attn.scale.equal(dense[f"{at}hc_attn_scale"])
        assert (attn.compressor is None) == (ratio == 0)
        assert (attn.index_compressor is None) == (ratio != 4)
        assert (moe.bias is None) == (moe.tid2eid is not None) == TINY.is_hash_layer(i)
        for e in range(TINY.n_routed_experts):
            expert = [dense[f"{at}ffn.experts.{e}.{m}.weight"] for m in ("w1", "w3", "w2")]
            assert moe.experts.dense13[e].float().equal(torch.cat(expert[:2]))
            assert moe.experts.dense2[e].float().equal(expert[2])
        shared = [dense[f"{at}ffn.shared_experts.{m}.weight"] for m in ("w1", "w3")]
        assert moe.shared_w13.dense.float().equal(torch.cat(shared))
    assert weights.head.weight.float().equal(dense["head.weight"])
    assert weights.hc_head.fn.fn.equal(dense["hc_head_fn"])


def test_shared_experts_pad_their_own_width_only(tmp_path):
    """Neither hidden size nor expert width fill the last 128 block."""
    preset = presets.tiny() | {"hidden_size": 192, "moe_intermediate_size": 192}
    make_checkpoint(tmp_path, preset)
    dense = dequantised(tmp_path)
    moe = load_target(tmp_path, ModelConfig.from_hf(preset)).blocks[0].moe
    w1, w3, w2 = (
        dense[f"layers.0.ffn.shared_experts.{name}.weight"] for name in ("w1", "w3", "w2")
    )
    zero = torch.zeros(64, 192)
    assert moe.shared_w13.dense.float().equal(torch.cat((w1, zero, w3, zero)))
    assert moe.shared_w2.dense.float().equal(torch.cat((w2, zero.T), 1))


def test_a_query_rank_inside_an_fp8_block_is_zero_filled(tmp_path):
    """The latent of rank 32 is followed by the key-value rows with their own scales."""
    preset = presets.tiny() | {"q_lora_rank": 32}
    make_checkpoint(tmp_path, preset)
    dense = dequantised(tmp_path)
    attn = load_target(tmp_path, ModelConfig.from_hf(preset)).blocks[1].attn
    wq_a, wkv = (dense[f"layers.1.attn.{name}.weight"] for name in ("wq_a", "wkv"))
    zero = torch.zeros(96, 128)
    assert attn.wqkv_a.dense.float().equal(torch.cat((wq_a, zero, wkv)))
    assert attn.wkv.dense.float().equal(wkv)
    assert attn.wkv.codes.data_ptr() == attn.wqkv_a.codes[128:].data_ptr()


def test_compressor_rows_follow_the_state_row_layout(weights, dense):
    """C4: kv A, kv B, score A, score B; and the position bias splits into A rows above B rows."""
    heads = TINY.index_n_heads
    both = weights.blocks[1].attn.wcompress.weight
    projections = dict(
        zip(("compressor", "indexer", ""), both.split([2048, 512, heads]), strict=True)
    )
    assert projections[""].float().equal(dense["layers.1.attn.indexer.weights_proj.weight"])
    for module, get, width in (
        ("layers.1.attn.compressor", lambda a: a.compressor, 512),
        ("layers.1.attn.indexer.compressor", lambda a: a.index_compressor, 128),
    ):
        ours = get(weights.blocks[1].attn)
        matrix = projections[module.split(".")[3]]
        wkv, wgate = dense[f"{module}.wkv.weight"], dense[f"{module}.wgate.weight"]
        parts = matrix.float().split(width)
        for part, expected in zip(
            parts, [wkv[:width], wkv[width:], wgate[:width], wgate[width:]], strict=True
        ):
            assert part.equal(expected)
        ape = dense[f"{module}.ape"]
        assert ours.ape.shape == (8, width)
        assert ours.ape[2].equal(ape[2, :width])
        assert ours.ape[4 + 2].equal(ape[2, width:])
    c128 = weights.blocks[2].attn.compressor
    assert c128.ape.equal(dense["layers.2.attn.compressor.ape"])
    assert weights.blocks[2].attn.wcompress.weight.shape == (1024, TINY.hidden_size)


@pytest.mark.parametrize("seed", range(5))
def test_load_order_does_not_matter(copy, weights, seed):
    """Shards permuted, draft before or after the target: the same state."""
    generator = torch.Generator().manual_seed(seed)

    def permute(weight_map):
        names = list(weight_map)
        return {
            names[i]: weight_map[names[i]] for i in torch.randperm(len(names), generator=generator)
        }

    draft = load_draft(copy, TINY)
    edit_index(copy, permute)
    if seed % 2:
        target_again, draft_again = load_target(copy, TINY), load_draft(copy, TINY)
    else:
        draft_again, target_again = load_draft(copy, TINY), load_target(copy, TINY)
    assert_same(weights, target_again)
    assert_same(draft, draft_again)


class Edited(Checkpoint):
    """A checkpoint whose tensors arrive as `edit` makes it of their list."""

    def __init__(self, directory, edit):
        super().__init__(directory)
        self.edit = edit

    def stored(self, wanted):
        return iter(self.edit(list(super().stored(wanted))))


def test_the_order_of_arrival_does_not_matter(tiny_directory, weights):
    assert_same(weights, load_target(Edited(tiny_directory, reversed), TINY))


def test_loaded_weights_outlive_the_files(copy):
    loaded = load_target(copy, TINY)
    before = [tensor.clone() for _, tensor in leaves(loaded)]
    for shard in copy.glob("*.safetensors"):
        shard.write_bytes(b"\0" * shard.stat().st_size)
    assert all(
        a.view(torch.uint8).equal(b.view(torch.uint8))
        for a, (_, b) in zip(before, leaves(loaded), strict=True)
    )


def test_the_draft_opens_only_its_own_shards(tiny_directory):
    checkpoint = Checkpoint(tiny_directory)
    load_draft(checkpoint, TINY)
    of_draft = {s for n, s in checkpoint.shard_of.items() if n.startswith("mtp.")}
    assert sorted(checkpoint.opened) == sorted(of_draft)
    assert len(of_draft) < len(set(checkpoint.shard_of.values())) / 2


def test_the_target_opens_no_draft_shard_and_each_shard_once(tiny_directory):
    checkpoint = Checkpoint(tiny_directory)
    load_target(checkpoint, TINY)
    of_target = {s for n, s in checkpoint.shard_of.items() if not n.startswith("mtp.")}
    assert sorted(checkpoint.opened) == sorted(of_target)


def test_draft_parts(tiny_directory):
    raw = dict(Checkpoint(tiny_directory).tensors(lambda n: n.startswith("mtp.")))
    draft = load_draft(tiny_directory, TINY)
    assert len(draft.blocks) == 3
    assert draft.main_proj.codes.shape == (128, 3 * 128)
    assert draft.main_norm.equal(raw["mtp.0.main_norm.weight"])
    assert draft.norm.equal(raw["mtp.2.norm.weight"])
    assert draft.markov_w1.equal(raw["mtp.2.markov_head.markov_w1.weight"])
    assert draft.markov_w2.weight.equal(raw["mtp.2.markov_head.markov_w2.weight"])
    assert draft.confidence.shape == (128 + 32,)
    assert draft.confidence.equal(raw["mtp.2.confidence_head.proj.weight"][0].float())
    assert all(b.moe.bias is not None and b.attn.compressor is None for b in draft.blocks)


def test_a_single_file_without_index_loads_too(copy, weights):
    tensors = dict(Checkpoint(copy).tensors(lambda _: True))
    for file in [*copy.glob("*.safetensors"), copy / INDEX]:
        file.unlink()
    save_file(tensors, copy / "model.safetensors")
    assert_same(weights, load_target(copy, TINY))


@pytest.fixture(scope="module")
def tp2(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tp2") / "checkpoint"
    make_checkpoint(directory, presets.tiny_tp2())
    config = ModelConfig.from_checkpoint(directory)
    return (
        config,
        load_target(directory, config),
        [load_target(directory, config, r, 2) for r in (0, 1)],
    )


def test_two_ranks_hold_the_whole_between_them(tp2):
    config, whole, ranks = tp2
    hidden, width = config.hidden_size, config.moe_intermediate_size // 2
    for i, block in enumerate(whole.blocks):
        a, b = (rank.blocks[i] for rank in ranks)
        for name, axis in (("wo_a", 0), ("wo_b", 1)):
            halves = [getattr(x.attn, name).dense for x in (a, b)]
            assert torch.cat(halves, axis).equal(getattr(block.attn, name).dense)
        queries = config.num_attention_heads // 2 * 512
        halves = [x.attn.wq_b.dense[:queries] for x in (a, b)]
        index_rows = a.attn.wq_b.dense[queries:]  # replicated
        assert torch.cat([*halves, index_rows]).equal(block.attn.wq_b.dense)
        assert index_rows.equal(b.attn.wq_b.dense[queries:])
        assert torch.cat((a.attn.sink, b.attn.sink)).equal(block.attn.sink)
        for whole13, halves in (
            (block.moe.experts.dense13, [x.moe.experts.dense13 for x in (a, b)]),
            (block.moe.shared_w13.dense[None], [x.moe.shared_w13.dense[None] for x in (a, b)]),
        ):
            gate = torch.cat([half[:, :width] for half in halves], 1)
            up = torch.cat([half[:, width:] for half in halves], 1)
            assert torch.cat((gate, up), 1).equal(whole13)
        dense2 = torch.cat([x.moe.experts.dense2 for x in (a, b)], 2)
        assert dense2.equal(block.moe.experts.dense2)
        shared2 = torch.cat([x.moe.shared_w2.dense for x in (a, b)], 1)
        assert shared2.equal(block.moe.shared_w2.dense)
        for replicated in ("wqkv_a", "wcompress", "q_norm", "index_compressor", "compressor"):
            if getattr(block.attn, replicated) is not None:
                for (path, x), (_, y) in zip(
                    leaves(getattr(a.attn, replicated)),
                    leaves(getattr(block.attn, replicated)),
                    strict=True,
                ):
                    assert x.view(torch.uint8).equal(y.view(torch.uint8)), (replicated, path)
    assert torch.cat([r.embed for r in ranks]).equal(whole.embed)
    assert torch.cat([r.head.weight for r in ranks]).equal(whole.head.weight)
    assert whole.embed.shape == (config.vocab_size, hidden)


def test_a_slice_inside_an_fp8_block_keeps_its_scale(tiny_directory, weights):
    """TINY on two ranks leaves 64-wide slices; the shared expert is zero-filled to 128."""
    whole = weights.blocks[1]
    for r in (0, 1):
        block = load_target(tiny_directory, TINY, r, 2).blocks[1]
        part = slice(64 * r, 64 * (r + 1))
        assert block.attn.wo_a.dense.equal(whole.attn.wo_a.dense[part])
        assert block.attn.wo_b.dense.equal(whole.attn.wo_b.dense[:, part])
        gate, up = block.moe.shared_w13.dense.split(128)
        assert gate[:64].equal(whole.moe.shared_w13.dense[:128][part])
        assert up[:64].equal(whole.moe.shared_w13.dense[128:][part])
        assert not gate[64:].any()
        assert not up[64:].any()
        assert block.moe.shared_w2.dense[:, :64].equal(whole.moe.shared_w2.dense[:, part])
        assert not block.moe.shared_w2.dense[:, 64:].any()


def test_draft_ranks_share_markov_w2(tiny_directory):
    whole = load_draft(tiny_directory, TINY)
    ranks = [load_draft(tiny_directory, TINY, r, 2) for r in (0, 1)]
    assert torch.cat([r.markov_w2.weight for r in ranks]).equal(whole.markov_w2.weight)
    assert all(r.markov_w1.equal(whole.markov_w1) for r in ranks)
    assert all(isinstance(r.main_proj, Fp8Weight) for r in ranks)


@pytest.mark.parametrize(
    ("fields", "size", "sentence"),
    [
        ({}, 3, "Tensor parallel size 3 does not divide o_groups 2"),
        ({"vocab_size": 511, "dspark_noise_token_id": 0}, 2, "does not divide vocab_size 511"),
        ({"moe_intermediate_size": 96}, 2, "leaves 48 of moe_intermediate_size"),
        ({"moe_intermediate_size": 384}, 2, "leaves 192 of moe_intermediate_size, which cuts"),
        ({"o_lora_rank": 192}, 2, "leaves 192 of o_groups \\* o_lora_rank, which cuts"),
    ],
)
def test_impossible_tensor_parallel_sizes_are_named(fields, size, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_tp(ModelConfig.from_hf(presets.tiny() | fields), size)


def test_flash_splits_over_eight_ranks():
    check_tp(ModelConfig.from_hf(presets.flash()), 8)


VICTIM = "layers.3.attn.wkv"


def drop(key):
    return lambda tensors: tensors.pop(key)


def replace(key, make):
    return lambda tensors: tensors.__setitem__(key, make(tensors[key]).contiguous())


def with_nan_scale(scale):
    raw = scale.view(torch.uint8).clone()
    raw[-1, -1] = 255
    return raw.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            replace(f"{VICTIM}.weight", lambda t: t[:-1]),
            r"wkv\.weight must have shape \[512, 128\]",
        ),
        (
            replace(f"{VICTIM}.weight", lambda t: t.float()),
            r"wkv\.weight must be torch.float8_e4m3",
        ),
        (replace(f"{VICTIM}.scale", with_nan_scale), r"wkv\.scale contains scale byte 255"),
        (replace(f"{VICTIM}.scale", lambda t: t.float()), r"wkv\.scale must be torch.float8_e8m0"),
        (
            drop(f"{VICTIM}.scale"),
            r"index\.json lists tensor layers\.3\.attn\.wkv\.scale in .*no such",
        ),
        (
            lambda tensors: tensors.__setitem__("layers.3.attn.bias", torch.zeros(1)),
            r"holds tensor layers\.3\.attn\.bias, which .*index\.json does not list",
        ),
    ],
)
def test_a_damaged_tensor_is_one_sentence_naming_it(copy, change, sentence):
    rewrite(copy, f"{VICTIM}.weight", change)
    with pytest.raises(CheckpointError, match=sentence) as error:
        load_target(copy, TINY)
    assert str(error.value).count("\n") == 0


def test_an_expert_scale_that_the_kernels_cannot_hold_names_its_layer(copy):
    def with_large_scale(scale):
        raw = scale.view(torch.uint8).clone()
        raw[0, 0] = 130
        return raw.view(torch.float8_e8m0fnu)

    name = "layers.2.ffn.experts.1.w2.scale"
    rewrite(copy, name, replace(name, with_large_scale))
    with pytest.raises(
        CheckpointError, match=r"^layers\.2\.ffn\.experts: An MXFP4 scale is 2\^3; scales above 2"
    ):
        load_target(copy, TINY)


def test_missing_and_extra_names_are_found_before_any_shard_is_opened(copy):
    edit_index(copy, lambda m: {n: s for n, s in m.items() if n != f"{VICTIM}.scale"})
    checkpoint = Checkpoint(copy)
    with pytest.raises(CheckpointError, match=r"has no tensor layers\.3\.attn\.wkv\.scale\.$"):
        load_target(checkpoint, TINY)
    edit_index(copy, lambda m: {n: s for n, s in m.items() if not n.startswith("layers.4.")})
    with pytest.raises(
        CheckpointError, match=r"no tensor layers\.3\.attn\.wkv\.scale \(\d+ tensors"
    ):
        load_target(Checkpoint(copy), TINY)
    edit_index(copy, lambda m: m | {"layers.9.attn.sink": "x"})
    with pytest.raises(CheckpointError, match=r"Tensor layers\.9\.attn\.sink does not belong"):
        load_target(Checkpoint(copy), TINY)
    assert checkpoint.opened == []


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_shard_is_named(copy, keep):
    shard = copy / Checkpoint(copy).shard_of["mtp.1.attn.wkv.weight"]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated"):
        load_draft(copy, TINY)
    load_target(copy, TINY)  # does not need that shard


def test_missing_or_garbled_files_are_named(copy, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors\.index\.json nor"):
        Checkpoint(tmp_path)
    shard = copy / Checkpoint(copy).shard_of["head.weight"]
    shard.write_bytes((20).to_bytes(8, "little") + b"not json at all. not json")
    with pytest.raises(CheckpointError, match=rf"{shard.name} has no readable safetensors header"):
        load_target(copy, TINY)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"Cannot read .*{shard.name}: No such file"):
        load_target(copy, TINY)
    (copy / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="has no readable weight_map"):
        Checkpoint(copy)


def test_tensors_that_repeat_are_refused_and_missing_ones_named(tiny_directory):
    def load(edit):
        return load_target(Edited(tiny_directory, edit), TINY)

    names = [stored.name for stored in Checkpoint(tiny_directory).stored(target_tensors(TINY).get)]
    with pytest.raises(CheckpointError, match=rf"Tensor {names[0]} occurs twice"):
        load(lambda found: [*found, found[0]])
    with pytest.raises(CheckpointError, match=rf"has no tensor {names[-1]}\."):
        load(lambda found: found[:-1])
    with pytest.raises(CheckpointError, match=r"Tensor visual\.patch does not belong"):
        load(lambda found: [*found, found[0]._replace(name="visual.patch")])


def test_hash_table_with_an_expert_that_does_not_exist(copy):
    name = "layers.1.ffn.gate.tid2eid"
    rewrite(copy, name, replace(name, lambda t: torch.full_like(t, 8)))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.ffn\.gate\.tid2eid names an expert outside 0\.\.7"
    ):
        load_target(copy, TINY)


def test_a_checkpoint_without_the_draft_still_loads_as_target(copy, weights):
    edit_index(copy, lambda m: {n: s for n, s in m.items() if not n.startswith("mtp.")})
    assert_same(weights, load_target(copy, TINY))
    with pytest.raises(ConfigError, match="it holds no mtp"):
        load_draft(copy, TINY)


def test_a_stray_draft_tensor_is_refused(copy):
    """The shared expert of a draft stage under a wrong name must not vanish silently."""
    edit_index(copy, lambda m: m | {"mtp.2.ffn.shared_experts.w4.weight": "x"})
    with pytest.raises(CheckpointError, match=r"mtp\.2\.ffn\.shared_experts\.w4\.weight does not"):
        load_draft(copy, TINY)


def test_tables_cover_target_and_draft_without_overlap(tiny_directory):
    target, draft = target_tensors(TINY), draft_tensors(TINY)
    assert not target.keys() & draft.keys()
    assert Checkpoint(tiny_directory).shard_of.keys() == target.keys() | draft.keys()
