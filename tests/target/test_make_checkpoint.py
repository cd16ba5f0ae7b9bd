"""`dspark make-checkpoint`: determinism, file format, tokenizer, and refusals."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from dspark.target.checkpoint import presets
from dspark.target.checkpoint.make import main, make_checkpoint
from dspark.target.checkpoint.names import TORCH_DTYPE, TensorSpec, checkpoint_tensors, total_bytes
from dspark.target.checkpoint.random_weights import Recipe, random_tensor
from dspark.target.checkpoint.reader import Checkpoint
from dspark.target.checkpoint.tokenizer import byte_tokenizer
from dspark.target.checkpoint.writer import plan_shards, write_checkpoint
from dspark.target.config import ModelConfig

TINY = ModelConfig.from_hf(presets.tiny())


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_same_seed_same_bytes_and_another_seed_other_bytes(tiny_directory, tmp_path):
    make_checkpoint(tmp_path / "again", presets.tiny(), shard_bytes=1 << 20)
    assert contents(tmp_path / "again") == contents(tiny_directory)
    make_checkpoint(tmp_path / "other", presets.tiny(), seed=1, shard_bytes=1 << 20)
    changed = [
        n for n, b in contents(tmp_path / "other").items() if b != contents(tiny_directory)[n]
    ]
    assert changed == [name for name in contents(tiny_directory) if name.startswith("model-")]


def test_tensors_do_not_depend_on_the_sharding(tiny_directory, tmp_path):
    make_checkpoint(tmp_path / "one", presets.tiny())
    one = dict(Checkpoint(tmp_path / "one").tensors(lambda _: True))
    for name, tensor in Checkpoint(tiny_directory).tensors(lambda _: True):
        assert tensor.view(torch.uint8).equal(one[name].view(torch.uint8)), name


def test_the_safetensors_library_agrees_with_the_table(tiny_directory):
    table = checkpoint_tensors(TINY)
    seen = {}
    for file in tiny_directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                tensor = handle.get_tensor(name)
                assert tensor.dtype == TORCH_DTYPE[table[name].dtype]
                assert tuple(tensor.shape) == table[name].shape
                seen[name] = file.name
    assert seen.keys() == table.keys()
    index = json.loads((tiny_directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == seen
    assert index["metadata"]["total_size"] == total_bytes(table)


def test_draft_and_target_never_share_a_shard(tiny_directory):
    shards: dict[str, set[bool]] = {}
    for name, shard in Checkpoint(tiny_directory).shard_of.items():
        shards.setdefault(shard, set()).add(name.startswith("mtp."))
    assert len(shards) >= 10
    assert all(len(kinds) == 1 for kinds in shards.values())


def test_a_shard_is_closed_before_it_would_grow_too_large():
    sizes = [60, 30, 20, 200, 10]
    table = {f"t{i}": TensorSpec("I8", (size,)) for i, size in enumerate(sizes)}
    table["mtp.0.x"] = TensorSpec("I8", (1,))
    assert plan_shards(table, 100) == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["mtp.0.x"]]


def test_the_writer_refuses_a_tensor_other_than_announced(tmp_path):
    table = {"a": TensorSpec("F32", (2,))}
    with pytest.raises(ValueError, match=r"Tensor a was announced as F32 \[2\] but produced as"):
        write_checkpoint(tmp_path, table, lambda name, spec: torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("attn.wq_b", 1.0),
        ("attn.wo_b", 0.25),
        ("ffn.experts.1.w1", 1.0),
        ("ffn.experts.1.w2", 0.25),
    ],
)
def test_quantised_weights_have_the_intended_spread(name, std):
    """Unit-variance input gives outputs of spread `std`; only sublayer outputs feel alpha."""
    from dspark.kernels.common.fp8 import decode_e8m0
    from dspark.kernels.linear import dequantise_fp8
    from dspark.kernels.moe import dequantise_mxfp4

    big = ModelConfig.from_hf(presets.tiny() | {"hidden_size": 1024, "q_lora_rank": 1024})
    table, recipe = checkpoint_tensors(big), Recipe(seed=3, alpha=0.25)
    weight, scale = (
        random_tensor(key, table[key], big, recipe)
        for key in (f"layers.2.{name}.weight", f"layers.2.{name}.scale")
    )
    if weight.dtype == torch.int8:
        dense = dequantise_mxfp4(weight.view(torch.uint8), scale.view(torch.uint8))
    else:
        dense = dequantise_fp8(weight, decode_e8m0(scale))
    # Few blocks mean a random mix of scales, each up to a factor of two from the middle.
    assert std / 1.6 < dense.std().item() * dense.shape[1] ** 0.5 < std * 1.6
    assert len(scale.view(torch.uint8).unique()) == 3


def test_special_tokens_are_never_predicted(tiny_directory):
    """The head rows of bos, eos and noise carry no bigram, all others one of their own."""
    tensors = dict(Checkpoint(tiny_directory).tensors(lambda n: n.startswith(("embed", "head"))))
    rank = TINY.dspark.markov_rank
    bigram = tensors["head.weight"][:, :rank].float()
    assert [t for t in range(512) if not bigram[t].any()] == [0, 1, 511]
    ordinary = [t for t in range(512) if t not in (0, 1, 511)]
    successor = (tensors["embed.weight"][:, :rank].float() @ bigram.T).argmax(1)
    token, seen = 2, []
    while token not in seen:
        seen.append(token)
        token = int(successor[token])
    assert sorted(seen) == ordinary  # one cycle through all of them


def test_tokenizer_round_trips_text_and_knows_its_special_tokens(tiny_directory):
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    text = "Grüße, 世界! \n\t two  spaces"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [byte + 2 for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([0, 300, 1, 511], skip_special_tokens=True) == "<300><511>"
    assert len(tokenizer) == 512


def test_tokenizer_needs_room_for_all_bytes():
    with pytest.raises(ValueError, match="needs 258 ids, got 200"):
        byte_tokenizer(200)


def test_command_line_writes_and_then_refuses_to_overwrite(tmp_path, capsys):
    target = tmp_path / "deep" / "tiny"
    assert main([str(target), "--config", "tiny-tp2", "--acceptance", "low", "--seed", "3"]) == 0
    assert "tiny-tp2, 360 tensors, 8.7 MiB in 6 shards." in capsys.readouterr().out
    before = contents(target)
    assert main([str(target)]) == 1
    message = capsys.readouterr().err
    assert message == f"dspark make-checkpoint: {target} exists and is not an empty directory.\n"
    assert contents(target) == before


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main([str(blocker)]) == 1
    small = presets.tiny() | {"vocab_size": 100, "dspark_noise_token_id": 99}
    with pytest.raises(ValueError, match="needs 258 ids"):
        make_checkpoint(tmp_path / "small", small)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [["x", "--config", "huge"], ["x", "--acceptance", "1"], []])
def test_bad_arguments_are_refused_by_name(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["mini-flash", "mini-rank"])
def test_mini_presets_at_reduced_size_have_every_tensor(tmp_path, preset):
    """The real ones are gigabytes; here with few narrow experts and a small vocabulary."""
    config = presets.PRESETS[preset]() | {
        "n_routed_experts": 6,
        "moe_intermediate_size": 32,
        "vocab_size": 300,
        "hidden_size": 128,
        "q_lora_rank": 128,
        "o_lora_rank": 32,
        "dspark_noise_token_id": 299,
        "dspark_markov_rank": 32,
    }
    written = make_checkpoint(tmp_path / preset, config)
    assert written.tensors == len(checkpoint_tensors(ModelConfig.from_hf(config)))
