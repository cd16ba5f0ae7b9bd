"""Tuned launch configurations reach the launch table of the process, or a sentence says why not."""

import json
import os

import pytest
import torch

from dspark.errors import UsageError
from dspark.host import tuned
from dspark.kernels.common import launch_table
from dspark.kernels.draft import kernel as draft_kernel
from dspark.kernels.schedule import kernel as schedule_kernel

ADA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def ada(monkeypatch):
    """A card of compute capability 8.9, and a launch table that is restored afterwards."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for module in (schedule_kernel, draft_kernel):
        monkeypatch.setattr(module, "LAUNCH", dict(module.LAUNCH))


@pytest.fixture
def name(monkeypatch):
    def set_variable(*paths) -> None:
        monkeypatch.setenv("DSPARK_TUNED", os.pathsep.join(map(str, paths)))

    return set_variable


def winner(path, op: str, **changes):
    """A file that launches `op` with 16 warps, otherwise as today."""
    today = launch_table.configurations()[op]
    content = {
        "schema": 1,
        "op": op,
        "sm": 89,
        "source_sha256": launch_table.source_sha256(op.partition(".")[0]),
        "config": today._replace(num_warps=16)._asdict(),
    }
    path.write_text(json.dumps(content | changes))
    return path


def test_every_file_replaces_its_entry(ada, name, tmp_path):
    ops = ("schedule.schedule", "draft.markov_step")
    paths = [winner(tmp_path / f"{op}.json", op) for op in ops]
    name(*paths)
    before = launch_table.configurations()
    assert tuned.load(ADA) == paths
    after = launch_table.configurations()
    assert {op for op in after if after[op] != before[op]} == set(ops)
    assert all(after[op].num_warps == 16 for op in ops)


def test_a_file_for_another_card_is_left_out_with_a_warning(ada, name, tmp_path):
    name(winner(tmp_path / "hopper.json", "schedule.schedule", sm=90))
    before = launch_table.configurations()
    with pytest.warns(UserWarning, match=r"hopper\.json.*tuned for sm_90, this is sm_89"):
        assert tuned.load(ADA) == []
    assert launch_table.configurations() == before


def test_nothing_is_tuned_on_a_cpu_or_without_the_variable(ada, name, tmp_path, monkeypatch):
    name(winner(tmp_path / "winner.json", "schedule.schedule"))
    before = launch_table.configurations()
    assert tuned.load(CPU) == []
    monkeypatch.delenv("DSPARK_TUNED")
    assert tuned.load(ADA) == []
    assert launch_table.configurations() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"DSPARK_TUNED: .*winner\.json cannot be read: No such file"),
        ("num_warps: 4", r"DSPARK_TUNED: .*winner\.json is not the winner\.json of a tuning"),
        ("[1, 2]", r"is not the winner\.json of a tuning"),
    ],
)
def test_a_bad_file_is_one_sentence(name, tmp_path, content, said):
    path = tmp_path / "winner.json"
    if content is not None:
        path.write_text(content)
    name(path)
    with pytest.raises(UsageError, match=said) as error:
        tuned.files()
    assert str(error.value).count("\n") == 0
