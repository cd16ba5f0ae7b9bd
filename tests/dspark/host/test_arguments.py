"""What `dspark serve` refuses for DeepSeek-V4, and what it fills in."""

import argparse
import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.server_args import ServerArgs

from dspark import options
from dspark.errors import UsageError
from dspark.host import arguments, config_file
from dspark.kernels.compress import rows_fit_ring
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

TINY = ModelConfig.from_hf(presets.tiny())


def server_args(**given) -> ServerArgs:
    """Arguments as the command line leaves them, before SGLang resolves any."""
    args = object.__new__(ServerArgs)
    for field in dataclasses.fields(ServerArgs):
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = None
        object.__setattr__(args, field.name, value)
    for name, value in ({"model_path": "/tiny", "device": "cpu"} | given).items():
        object.__setattr__(args, name, value)
    return args


@pytest.fixture(scope="module")
def flags() -> set[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option for action in parser._actions for option in action.option_strings}


FIELDS = [f for u in arguments.UNSERVED for f in u.fields] + [f.field for f in arguments.FIXED]


def test_every_field_exists_and_has_the_flag_we_name(flags):
    known = {f.name for f in dataclasses.fields(ServerArgs)}
    assert set(FIELDS) <= known
    assert {arguments.flag(f) for f in FIELDS} - flags == set()


def test_plain_arguments_are_served():
    arguments.refuse(server_args(), TINY)
    arguments.refuse(server_args(speculative_algorithm="DSPARK"), TINY)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"enable_lora": True}, "--enable-lora: sglang-dspark does not serve LoRA adapters."),
        ({"lora_paths": ["a=b"]}, "--lora-paths"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"dp_size": 2}, "--dp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"ep_size": 2}, "--ep-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_multimodal": True}, "--enable-multimodal"),
        ({"disable_hybrid_swa_memory": True}, "--disable-hybrid-swa-memory"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"quantization": "awq"}, "--quantization awq"),
        ({"page_size": 64}, "--page-size 64"),
        ({"attention_backend": "triton"}, "--attention-backend triton"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"chunked_prefill_size": 100}, "--chunked-prefill-size 100"),
        ({"max_total_tokens": 256}, "--max-total-tokens 256"),
        ({"max_running_requests": 0}, "--max-running-requests 0"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"speculative_algorithm": "NEXTN"}, "--speculative-algorithm NEXTN"),
        ({"speculative_dspark_block_size": 3}, "--speculative-dspark-block-size"),
    ],
)
def test_refusals_name_the_flag_in_one_sentence(given, named):
    with pytest.raises(UsageError) as error:
        arguments.refuse(server_args(**given), TINY)
    message = str(error.value)
    assert message.startswith(f"dspark: {named}")
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculative_dspark_block_size": 6}, "proposes 1 to 5 tokens"),
        ({"speculative_dspark_block_size": 0}, "proposes 1 to 5 tokens"),
        ({"speculative_num_draft_tokens": 5}, "6 here"),
        ({"speculative_num_draft_tokens": 6, "speculative_dspark_block_size": 3}, "4 here"),
    ],
)
def test_contradictory_draft_lengths(given, named):
    with pytest.raises(UsageError, match=named):
        arguments.refuse(server_args(speculative_algorithm="DSPARK", **given), TINY)


def test_a_block_longer_than_a_verify_step_can_take_back():
    assert rows_fit_ring(arguments.LONGEST_BLOCK + 1, 16)
    assert not rows_fit_ring(arguments.LONGEST_BLOCK + 2, 16)
    for block, refused in ((arguments.LONGEST_BLOCK, False), (arguments.LONGEST_BLOCK + 1, True)):
        config = dataclasses.replace(
            TINY, dspark=dataclasses.replace(TINY.dspark, block_size=block)
        )
        given = server_args(speculative_algorithm="DSPARK")
        if refused:
            with pytest.raises(UsageError, match="longer than the 8 that a verify step"):
                arguments.refuse(given, config)
        else:
            arguments.refuse(given, config)


def test_draft_without_a_draft_in_the_checkpoint():
    plain = dataclasses.replace(TINY, dspark=None)
    with pytest.raises(UsageError, match="holds no DSpark draft"):
        arguments.refuse(server_args(speculative_algorithm="DSPARK"), plain)
    arguments.refuse(server_args(), plain)


def test_online_compression_is_refused_by_its_variable(monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_USE_ONLINE_COMPRESS", "1")
    with pytest.raises(UsageError, match="SGLANG_OPT_USE_ONLINE_COMPRESS"):
        arguments.refuse(server_args(), TINY)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((8, 6), r"8\.6 \(RTX 3090, A40\), which has no instruction that converts to FP8; 8\.9, "),
        ((8, 0), r"8\.0 \(A100\), which has no instruction that converts to FP8"),
        ((7, 5), r"7\.5, which no kernel of this package has been compiled for; 8\.9, 9\.0 and 12"),
        ((10, 0), r"10\.0, which no kernel of this package"),
    ],
)
def test_other_gpus_are_refused_with_the_reason(monkeypatch, found, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    with pytest.raises(UsageError, match=f"capability {said}") as refused:
        arguments.refuse_gpu()
    assert str(refused.value).endswith("are served (DSPARK_ALLOW_ANY_GPU=1 tries anyway).")
    monkeypatch.setenv(arguments.ALLOW_ANY_GPU, "1")
    arguments.refuse_gpu()


def test_gpus_that_are_served_without_or_with_a_warning(monkeypatch, capsys):
    for found in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        arguments.refuse_gpu()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    arguments.refuse_gpu()
    assert capsys.readouterr().err == (
        "dspark: this GPU has compute capability 12.0 (RTX 5090, RTX PRO 6000), which every kernel "
        "compiles for, but none has run on; check its outputs.\n"
    )


def test_defaults_fill_only_what_was_left_out(monkeypatch, tmp_path):
    for name in ("SGLANG_SWA_EVICTION_INTERVAL", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        monkeypatch.delenv(name, raising=False)
    args = server_args(model_path=str(tmp_path), max_total_tokens=4096)
    arguments.fill_defaults(args, TINY, on_cpu=True)
    assert args.max_total_tokens == 4096
    assert args.max_running_requests == 8
    assert args.chunked_prefill_size == 512
    assert args.skip_tokenizer_init  # the directory holds no tokenizer

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("DSPARK_CARD_BYTES", str(2 << 30))
    args = server_args(model_path=str(tmp_path), max_running_requests=3)
    arguments.fill_defaults(args, TINY, on_cpu=False)
    assert args.max_running_requests == args.cuda_graph_max_bs_decode == 3
    assert args.context_length == TINY.max_position_embeddings
    assert args.max_total_tokens is None  # the worker measures what its weights leave
    assert not args.skip_tokenizer_init


def test_eviction_interval_is_lowered_under_speculation_only():
    plain = arguments.default_environment(server_args(), on_cpu=False)
    drafting = arguments.default_environment(
        server_args(speculative_algorithm="DSPARK"), on_cpu=False
    )
    assert plain == {"SGLANG_FORCE_COARSE_WAR_BARRIER": "1"}
    assert drafting == plain | {"SGLANG_SWA_EVICTION_INTERVAL": "16"}


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [({0, 1, 2, 3}, 2, "0,2|1,3"), ({0, 1}, 2, "0|1"), ({5}, 2, "5|5"), ({1, 2, 3}, 2, "1,3|2")],
)
def test_cores_are_dealt_to_ranks(monkeypatch, cores, ranks, shares):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert arguments.share_cores(ranks) == shares


def test_missing_config_field_is_one_sentence(tmp_path):
    config = presets.tiny()
    del config["q_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="q_lora_rank"):
        arguments.resolve(lambda _: None, server_args(model_path=str(tmp_path)))


def test_unknown_class_name_of_the_family_is_named(tmp_path):
    config = presets.tiny() | {"architectures": ["DeepseekV4Other"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="DeepseekV4Other"):
        arguments.resolve(lambda _: None, server_args(model_path=str(tmp_path)))


def test_tensor_parallel_size_must_divide_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(presets.tiny()))
    with pytest.raises(UsageError, match="size 3"):
        arguments.resolve(lambda _: None, server_args(model_path=str(tmp_path), tp_size=3))


def test_algorithm_is_accepted_in_any_case(tiny_checkpoint):
    seen = []
    args = server_args(model_path=str(tiny_checkpoint), speculative_algorithm="dSpark")
    arguments.resolve(lambda a: seen.append(a.speculative_algorithm), args)
    assert seen == ["DSPARK"]


def test_other_models_are_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    args = server_args(model_path=str(tmp_path), speculative_algorithm="eagle", enable_lora=True)
    before = dict(vars(args))
    seen = []
    arguments.resolve(seen.append, args)
    assert seen == [args]
    assert vars(args) == before


def test_a_model_without_config_is_left_to_sglang(tmp_path):
    assert config_file.read_config(str(tmp_path / "absent"), None) == {}
    assert config_file.read_config(str(tmp_path), None) == {}
    assert not arguments.is_deepseek_v4(SimpleNamespace(model_path=str(tmp_path), revision=None))


@pytest.mark.parametrize(
    ("content", "said"),
    [("{ not json", "is not JSON"), ("[1]", "no JSON object"), ("\ufeff{}", "is not JSON")],
)
def test_a_corrupt_config_is_one_sentence(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=rf"config\.json.*{said}"):
        arguments.resolve(lambda _: None, server_args(model_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("length", "said"),
    [(0, "at least 1"), (-1, "at least 1"), (TINY.max_position_embeddings + 1, "longer than the")],
)
def test_a_context_beyond_the_checkpoint_is_refused(length, said):
    with pytest.raises(UsageError, match=rf"--context-length {length} .*{said}"):
        arguments.refuse(server_args(context_length=length), TINY)
    arguments.refuse(server_args(context_length=TINY.max_position_embeddings), TINY)


def test_a_flag_of_the_draft_needs_one(monkeypatch):
    monkeypatch.setattr(options, "_flags_given", {"DSPARK_VERIFY": "--dspark-verify"})
    with pytest.raises(UsageError, match="--dspark-verify needs --speculative-algorithm DSPARK"):
        arguments.refuse(server_args(), TINY)
    monkeypatch.setattr(options, "_flags_given", {"DSPARK_TUNED": "--dspark-tuned"})
    arguments.refuse(server_args(), TINY)


def shard_of(directory, name: str):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def rewrite(directory, name: str, change) -> None:
    """Replace the shard that holds `name` by one whose tensors went through `change`."""
    file = shard_of(directory, name)
    save_file(change(load_file(file)), file)


def truncate(directory) -> str:
    file = sorted(directory.glob("*.safetensors"))[2]
    os.truncate(file, file.stat().st_size - 100)
    return f"{file} is truncated"


def remove_shard(directory) -> str:
    file = sorted(directory.glob("*.safetensors"))[1]
    file.unlink()
    return f"Cannot read {file}"


SCALE = "layers.1.attn.wq_a.scale"


def drop_scale(directory) -> str:
    rewrite(directory, SCALE, lambda t: {k: v for k, v in t.items() if k != SCALE})
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][SCALE]
    index.write_text(json.dumps(content))
    return f"has no tensor {SCALE}"


def widen_scale(directory) -> str:
    rewrite(directory, SCALE, lambda t: t | {SCALE: t[SCALE].to(torch.float32)})
    return f"Tensor {SCALE} must be F8_E8M0"


def transpose_weight(directory) -> str:
    name = "layers.0.attn.wkv.weight"
    rewrite(directory, name, lambda t: t | {name: t[name].T.contiguous()})
    return f"Tensor {name} must be F8_E4M3"


def add_tensor(directory) -> str:
    rewrite(directory, SCALE, lambda t: t | {"layers.9.extra": torch.zeros(1)})
    return "layers.9.extra does not belong to this model"


@pytest.mark.parametrize(
    "damage",
    [truncate, remove_shard, drop_scale, widen_scale, transpose_weight, add_tensor],
)
def test_damaged_checkpoint_is_one_sentence_at_start(tiny_checkpoint, tmp_path, damage):
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, directory)
    expected = damage(directory)
    with pytest.raises(UsageError) as error:
        arguments.resolve(lambda _: None, server_args(model_path=str(directory)))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_draft_tensors_are_only_wanted_when_drafting(tiny_checkpoint, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, directory)
    name = "mtp.0.attn.wkv.weight"
    rewrite(directory, name, lambda t: t | {name: t[name].T.contiguous()})
    plain = server_args(model_path=str(directory))
    arguments.resolve(lambda _: None, plain)
    with pytest.raises(UsageError, match=name):
        arguments.resolve(
            lambda _: None, server_args(model_path=str(directory), speculative_algorithm="DSPARK")
        )


def test_a_bad_speculation_setting_stops_the_launcher(monkeypatch):
    monkeypatch.setenv("DSPARK_VERIFY", "sometimes")
    with pytest.raises(UsageError, match="DSPARK_VERIFY=sometimes"):
        arguments.refuse_speculation(server_args(speculative_algorithm="DSPARK"), TINY)
    arguments.refuse_speculation(server_args(), TINY)  # not read without speculation


def test_a_bad_tuned_configuration_stops_the_launcher(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("DSPARK_TUNED", "nowhere/winner.json")
    with pytest.raises(UsageError, match="DSPARK_TUNED: nowhere/winner"):
        arguments.resolve(lambda _: None, server_args(model_path=str(tiny_checkpoint)))
