"""What `dspark serve` says when it cannot serve: the last line, one sentence, no traceback."""

import os

import pytest


def sentence(done) -> str:
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dspark: ")
    return last


def test_truncated_shard(tiny, changed_config, run_serve):
    directory = changed_config(lambda config: None)
    shard = sorted(directory.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size // 2)
    assert "is truncated" in sentence(run_serve("--model-path", str(directory)))


def test_unknown_architecture(changed_config, run_serve):
    directory = changed_config(lambda config: config.update(architectures=["NobodyForCausalLM"]))
    assert "NobodyForCausalLM" in sentence(run_serve("--model-path", str(directory)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"], "data parallelism"),
        (["--speculative-algorithm", "eagle"], "DSPARK only"),
    ],
)
def test_flags(tiny, run_serve, flags, said):
    assert said in sentence(run_serve("--model-path", str(tiny), *flags))
