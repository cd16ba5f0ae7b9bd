"""The plugin in a process of its own, loaded by SGLang the way a worker loads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

WORKER = """
import sys
from dspark.host.launch import prepare_process, load_plugin
prepare_process(["--device", "cpu"])
{before}
load_plugin()
from dspark import plugin
from dspark.host import seams
{after}
"""

DROP_ONE = """
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target.__func__
def fail_for_one(cls, target, hooks):
    if target.endswith("SpeculativeAlgorithm.create_worker"):
        raise ValueError("this hook does not apply")
    return apply(cls, target, hooks)
HookRegistry._apply_target = classmethod(fail_for_one)
"""

CHECK = """
try:
    seams.check_worker()
except seams.HookLost as error:
    sys.exit(f"LOST {error}")
print("ACTIVE")
"""

BUILD_TARGET = """
from sglang.srt.models.registry import ModelRegistry
model, _ = ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])
try:
    model(None)
except seams.HookLost as error:
    sys.exit(f"LOST {error}")
"""

# A model that is not DeepSeek-V4 must reach SGLang's own code through every hook.
INERT = """
from types import SimpleNamespace as Some
from dspark.host import (
    answer_hooks, argument_hooks, control_hooks, cpu_hooks, loading_hooks, memory_hooks,
    rank_hooks, request_hooks, sampling_hooks, speculation_hooks, step_hooks,
)
import dspark.host.pools, dspark.host.allocator  # what a hook would reach for
asked = []
def original(*args, **kwargs):
    asked.append(args)
    return "stock"
llama = Some(architectures=["LlamaForCausalLM"])
args = Some(model_path="/nowhere", revision=None, device="cpu")
algorithm = Some(is_dspark=lambda: True)
manager = Some(model_config=Some(hf_config=llama))
future = Some(spec_algo=Some(is_dspark=lambda: False), device="cpu")
calls = [
    argument_hooks.resolve_arguments(original, args),
    request_hooks.check_prompt(original, manager, None, [-1]),
    request_hooks.abort_own_stream(original, manager, None),
    control_hooks.refuse_control(original, manager),
    control_hooks.check_settings(original, manager, None),
    control_hooks.pause_by_abort(original, manager, Some(mode="abort")),
    control_hooks.check_delay(original, manager, None),
    control_hooks.check_profile(original, manager, None),
    control_hooks.answer_profile(original, manager, None),
    answer_hooks.serve_chat(original, None, manager, None),
    answer_hooks.finish_tool_calls(original, Some(tokenizer_manager=manager)),
    answer_hooks.finish_reasoning(original, Some(tokenizer_manager=manager)),
    answer_hooks.stream_responses(original, Some(tokenizer_manager=manager), None, None, None),
    cpu_hooks.allow_dspark_on_cpu(original, args),
    memory_hooks.build_kv_pool(original, None, is_dsv4_model=False),
    memory_hooks.build_allocator(original, None, is_dsv4_model=False),
    memory_hooks.resolve_pool_config(original, Some(model_config=Some(hf_config=llama)), 1.0),
    speculation_hooks.choose_worker(original, algorithm, args),
    cpu_hooks.without_triton_on_cpu(original, "intel_amx"),
    cpu_hooks.bonus_tokens_without_stream(original, future, Some(spec_info=object())),
    cpu_hooks.keep_head_counts(original, Some(hf_config=llama), None, 2),
    speculation_hooks.reserve_draft_block(
        original, Some(speculative_algorithm="DFLASH", **vars(args))
    ),
    cpu_hooks.mask_logits_on_cpu(original, None, Some(device=Some(type="cuda")), None),
    rank_hooks.watch_ranks(original, None, args, None, None),
    rank_hooks.blame_before_giving_up(original, None, None),
    rank_hooks.blame_before_ending(original, None),
    rank_hooks.watch_no_rank_twice(original, None),
    rank_hooks.stop_watching(original, None),
]
from sglang.srt import runtime_context
runtime_context.get_server_args = lambda: args
calls += [
    speculation_hooks.check_draft_request(original, None, True),
    step_hooks.finish_in_token_order(original, None),
    speculation_hooks.draft_at_trained_width(original, algorithm, 6, True),
    sampling_hooks.count_penalties_later(original, Some(enable_overlap=True)),
    sampling_hooks.count_penalties_at_forward(original, None, None, overlap=True),
    sampling_hooks.penalise_in_order(original, None, None),
    step_hooks.decode_between_chunks(original, None, None),
    step_hooks.measure_steps(original, None, None),
    control_hooks.keep_one_profile(original, None, None),
    loading_hooks.hand_over_directory(original, None, None),
]
assert [call for call in calls if call != "stock"] == [None] * 2, calls  # of two __init__
assert len(asked) == len(calls), asked
print("INERT")
"""


def run_worker(before: str = "", after: str = "", **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WORKER.format(before=before, after=after)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=240,
    )


SECRET = """
import dataclasses
from sglang.srt.server_args import ServerArgs
args = object.__new__(ServerArgs)
for field in dataclasses.fields(ServerArgs):
    object.__setattr__(args, field.name, None)
args.api_key, args.admin_api_key, args.port = "open sesame", "close sesame", 4711
assert "sesame" not in f"{args=}" and "port=4711" in f"{args=}", args
print("SECRET")
"""


def test_every_hook_takes_and_other_models_pass_through():
    done = run_worker(after=CHECK + INERT + SECRET)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["ACTIVE", "INERT", "SECRET"]


def test_a_hook_that_sglang_could_not_apply_stops_the_worker():
    """Here the hook that chooses our worker over the stock one."""
    done = run_worker(before=DROP_ONE, after=BUILD_TARGET)
    assert done.returncode == 1
    assert "LOST SGLang did not apply the hook on" in done.stderr
    assert "SpeculativeAlgorithm.create_worker" in done.stderr


BROKEN = """
from dspark import plugin
from dspark.host import seams
def verify():
    raise RuntimeError("a seam that cannot even be checked")
seams.verify = verify
from sglang.srt.plugins import load_plugins as load_plugin  # as a worker does
"""


def test_a_plugin_that_could_not_be_set_up_serves_no_stock_model(tmp_path):
    """The launcher refuses the model in a sentence; a worker that got further stops as it builds
    the target, where no hook, attention backend or worker of ours would be in place."""
    (path,) = write_configs(tmp_path, "DeepseekV4ForCausalLM")
    done = run_worker(BROKEN, START_ALL.format(paths=[path]) + BUILD_TARGET)
    assert done.stdout.startswith(f"REFUSED {path} dspark: this plugin could not be set up")
    assert "a seam that cannot even be checked" in done.stdout
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("LOST this plugin could not be set up (a seam that cannot even be")


def test_plugin_left_out_of_the_allow_list_is_one_sentence():
    done = run_worker(SGLANG_PLUGINS="another")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dspark: SGLang did not load this plugin")


REFUSE_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.16" if name == "sglang" else real(name)
"""

START_ALL = """
from sglang.srt.server_args import ServerArgs
for path in {paths!r}:
    try:
        ServerArgs(model_path=path, device="cpu")
    except SystemExit as refusal:
        print("REFUSED", path, refusal)
    except Exception:  # a directory with a config alone does not get far
        print("STOCK", path)
    else:
        print("STOCK", path)
"""


def write_configs(root: Path, *architectures: str) -> list[str]:
    """Directories that hold a config.json alone."""
    for name in architectures:
        (root / name).mkdir()
        config = {"architectures": [name], "model_type": "llama"}
        (root / name / "config.json").write_text(json.dumps(config))
    return [str(root / name) for name in architectures]


def test_another_sglang_version_refuses_deepseek_v4_only(tmp_path):
    paths = write_configs(tmp_path, "DeepseekV4ForCausalLM", "LlamaForCausalLM")
    done = run_worker(REFUSE_VERSION, START_ALL.format(paths=paths))
    first, second = done.stdout.strip().splitlines()
    assert first.startswith(f"REFUSED {paths[0]} dspark: this plugin works with SGLang 0.5.17 only")
    assert "found 0.5.16" in first
    assert second == f"STOCK {paths[1]}"


SEALED_ARGUMENTS = """
import msgspec, sglang.srt.server_args

class Sealed(msgspec.Struct):  # its replaced __post_init__ is never called
    model_path: str
    revision: str | None = None

    def __post_init__(self):
        pass

sglang.srt.server_args.ServerArgs = Sealed
sys.argv = ["launch_server", *{argv!r}]
from sglang.srt.plugins import load_plugins as load_plugin  # as launch_server does
"""
RESOLVE_SEALED = """
sglang.srt.server_args.ServerArgs(sys.argv[-1])
print("RESOLVED")
"""


def test_another_version_is_refused_by_the_command_line_alone(tmp_path):
    """Where the arguments can no longer be hooked; in one sentence, before anything is made."""
    paths = write_configs(tmp_path, "DeepseekV4ForCausalLM", "LlamaForCausalLM")
    faked = REFUSE_VERSION.replace("0.5.16", "0.5.23")
    sealed = [
        faked + SEALED_ARGUMENTS.format(argv=["--port", "1", "--model-path", path])
        for path in paths
    ]
    refused = run_worker(sealed[0], RESOLVE_SEALED)
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("dspark: this plugin works with SGLang 0.5.17 only, but found 0.5.23")
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""
    other = run_worker(sealed[1], RESOLVE_SEALED)
    assert other.stdout == "RESOLVED\n"


def test_a_worker_of_another_version_stops_with_the_same_sentence(tmp_path):
    """Where no command line names the model, as in a program that makes an engine."""
    (path,) = write_configs(tmp_path, "DeepseekV4ForCausalLM")
    faked = REFUSE_VERSION.replace("0.5.16", "0.5.23") + SEALED_ARGUMENTS.format(argv=[path])
    done = run_worker(faked, RESOLVE_SEALED + BUILD_TARGET)
    assert done.stdout == "RESOLVED\n"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("LOST this plugin works with SGLang 0.5.17 only, but found 0.5.23")
