"""A draft in a directory of its own is what counts, and must be one for the target."""

import json
import shutil
from types import SimpleNamespace

import pytest
from separated import separate

from dspark.errors import UsageError
from dspark.host import arguments, memory_budget, memory_report
from dspark.host.draft_checkpoint import with_draft
from dspark.target.checkpoint import presets
from dspark.target.checkpoint.names import draft_tensors, total_bytes
from dspark.target.config import ModelConfig

TINY = ModelConfig.from_hf(presets.tiny())


@pytest.fixture
def apart(tiny_checkpoint, tmp_path):
    """Arguments of a server whose target has no draft."""
    target, draft = separate(tiny_checkpoint, tmp_path)
    return SimpleNamespace(
        model_path=str(target),
        revision=None,
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(draft),
        speculative_draft_model_revision=None,
        tp_size=1,
    )


def edit(directory, **fields):
    file = f"{directory}/config.json"
    with open(file) as stream:
        content = json.load(stream)
    with open(file, "w") as stream:
        json.dump(content | fields, stream)


def test_the_draft_of_another_directory_is_the_one_that_is_sized(apart):
    alone = arguments.checkpoint_config(apart)
    assert alone.dspark is None
    config = with_draft(alone, apart)
    assert config.dspark == TINY.dspark
    arguments.check_shards(apart, config)
    weights = memory_budget.checkpoint_weights(config, 1, draft=True)
    assert weights.draft == total_bytes(draft_tensors(TINY))
    args = SimpleNamespace(
        **vars(apart),
        device="cpu",
        speculative_num_draft_tokens=6,
        max_running_requests=8,
        chunked_prefill_size=256,
        swa_full_tokens_ratio=0.05,
    )
    load = memory_report.load_of(args, config, 4096)
    assert load.stages == TINY.dspark.stages
    assert load.captured == len(TINY.dspark.target_layer_ids)


def test_without_drafting_or_in_the_same_directory_nothing_is_read(apart):
    config = arguments.checkpoint_config(apart)
    apart.speculative_algorithm = None
    assert with_draft(config, apart) is config
    apart.speculative_algorithm = "DSPARK"
    apart.speculative_draft_model_path = apart.model_path
    assert with_draft(config, apart) is config


def test_a_draft_of_another_model_is_refused(apart):
    edit(apart.speculative_draft_model_path, hidden_size=256)
    with pytest.raises(UsageError, match="made for another model: it has hidden_size 256, the"):
        with_draft(arguments.checkpoint_config(apart), apart)


def test_a_directory_without_a_draft_is_refused(apart, tmp_path):
    shutil.rmtree(apart.speculative_draft_model_path)
    shutil.copytree(apart.model_path, apart.speculative_draft_model_path)
    with pytest.raises(UsageError, match=r"holds no DSpark draft: config\.json has no dspark"):
        with_draft(arguments.checkpoint_config(apart), apart)


def test_a_damaged_draft_is_refused_before_anything_is_loaded(apart):
    config = with_draft(arguments.checkpoint_config(apart), apart)
    directory = apart.speculative_draft_model_path
    with open(f"{directory}/model.safetensors.index.json") as stream:
        index = json.load(stream)
    shard = f"{directory}/{index['weight_map']['mtp.0.attn.wkv.weight']}"
    with open(shard, "r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(UsageError, match="is truncated"):
        arguments.check_shards(apart, config)
