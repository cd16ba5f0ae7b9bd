"""`dspark doctor`: every check on hand-made inputs, the readers, and the command as a whole."""

import json
import os
import shutil

import pytest

from dspark import cli
from dspark.commands import checks, doctor
from dspark.commands.checks import Gpu, State
from dspark.host.memory_budget import GIB, MIB
from dspark.target.checkpoint import presets

ADA = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 23 * GIB, 24 * GIB, "580.1", 16, 16, 4)


def states(lines) -> list[State]:
    return [line.state for line in lines]


@pytest.mark.parametrize(
    ("found", "state"),
    [((3, 10, 1), State.PROBLEM), ((3, 11, 9), State.OK), ((3, 13, 0), State.PROBLEM)],
)
def test_pythons(found, state):
    assert checks.python_version(found).state is state


@pytest.mark.parametrize(
    ("requirement", "found", "state"),
    [
        ("torch>=2.11", "2.13.0+cpu", State.OK),
        ("torch>=2.11", "2.9.1", State.PROBLEM),
        ("triton>=3.6", None, State.PROBLEM),
    ],
)
def test_packages(requirement, found, state):
    line = checks.package(requirement, found)
    assert line.state is state
    assert (line.advice == f"pip install '{requirement}'") == (state is State.PROBLEM)


def test_another_sglang_and_changed_seams():
    assert checks.sglang("0.5.17").state is State.OK
    line = checks.sglang("0.5.18")
    assert (line.state, line.advice) == (State.PROBLEM, "pip install 'sglang==0.5.17'")
    assert checks.seams([], 9).found == "all 9 places where SGLang is met are as expected"
    line = checks.seams(["a is gone", "b is gone"], 9)
    assert (line.state, line.found) == (State.PROBLEM, "a is gone (and 1 more)")


def test_no_gpu_is_no_problem_and_says_what_works():
    (line,) = checks.gpus([])
    assert line.state is State.NOTE
    assert "runs on the CPU" in line.found
    assert "8.9, 9.0 and 12.0" in line.advice


@pytest.mark.parametrize(
    ("capability", "state", "said"),
    [
        ((8, 9), State.OK, "compute capability 8.9, 23.0 of 24.0 GiB free, driver 580.1"),
        ((9, 0), State.OK, "9.0"),
        ((12, 0), State.NOTE, "none has run on"),
        ((8, 6), State.PROBLEM, "has no instruction that converts to FP8"),
        ((7, 5), State.PROBLEM, "no kernel of this package has been compiled for"),
    ],
)
def test_gpus_by_capability(capability, state, said):
    (line,) = checks.gpus([ADA._replace(capability=capability)])
    assert line.state is state
    assert said in line.found
    assert bool(line.advice) == (state is not State.OK)


def test_cards_that_differ_are_named():
    other = ADA._replace(total=48 * GIB)
    assert states(checks.gpus([ADA, ADA])) == [State.OK, State.OK]
    lines = checks.gpus([ADA, other])
    assert states(lines) == [State.OK, State.OK, State.NOTE]
    assert "as the smallest has" in lines[2].found


def test_few_lanes_matter_between_cards():
    few = ADA._replace(width=4)
    assert states(checks.pcie([few])) == [State.OK]
    assert states(checks.pcie([ADA, few])) == [State.OK, State.NOTE]
    assert checks.pcie([ADA, few])[1].found == "4 of 16 lanes, generation 4"
    assert checks.pcie([ADA._replace(width=None)]) == []


def test_peer_access():
    assert checks.peer_access({}) == []
    assert states(checks.peer_access({(0, 1): True, (1, 0): True})) == [State.OK]
    (line,) = checks.peer_access({(0, 1): True, (1, 0): False})
    assert line.state is State.NOTE
    assert line.found.startswith("1 of 2 pairs of cards cannot read")


def test_iommu_and_memory():
    assert checks.iommu(0, 8).state is State.OK
    assert checks.iommu(40, 1).state is State.OK
    assert "iommu=pt" in checks.iommu(40, 8).advice
    assert checks.host_memory(32 * GIB, 8).state is State.OK
    assert checks.host_memory(31 * GIB, 8).state is State.PROBLEM
    assert checks.host_memory(3 * GIB, 1).state is State.NOTE
    assert checks.shared_memory(64 * MIB, 1).state is State.OK
    assert checks.shared_memory(64 * MIB, 2).state is State.PROBLEM
    assert checks.shared_memory(None, 2).found == "no /dev/shm"
    assert checks.shared_memory(8 * GIB, 2).state is State.OK


def test_a_compiler_that_fails_is_a_line():
    def broken() -> list[str]:
        raise RuntimeError("first\nptxas: not found")

    assert checks.compiles(list, "sm_89").found == "a kernel compiles for sm_89"
    assert checks.compiles(lambda: ["spills"], "sm_89").state is State.PROBLEM
    assert checks.compiles(broken, "sm_89").found == "ptxas: not found"


def test_a_whole_checkpoint(tiny_checkpoint):
    lines = checks.checkpoint(tiny_checkpoint, free_disk=0)
    assert states(lines) == [State.OK] * 3
    assert "5 layers" in lines[0].found
    assert lines[1].found == "3 DSpark stages, 5 tokens a step"


def damaged(tiny_checkpoint, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, directory)
    return directory


def test_a_damaged_checkpoint_names_the_tensor_or_file(tiny_checkpoint, tmp_path):
    directory = damaged(tiny_checkpoint, tmp_path)
    shard = sorted(directory.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    *_, tensors, disk = checks.checkpoint(directory, free_disk=GIB)
    assert tensors.state is State.PROBLEM
    assert f"{shard} is truncated" in tensors.found
    assert disk.state is State.OK
    shard.unlink()
    *_, tensors, disk = checks.checkpoint(directory, free_disk=1000)
    assert f"Cannot read {shard}" in tensors.found
    assert (disk.state, disk.advice) == (State.PROBLEM, "the checkpoint takes 0.0 GiB")


def test_a_checkpoint_without_a_draft_or_of_another_model(tiny_checkpoint, tmp_path):
    directory = damaged(tiny_checkpoint, tmp_path)
    file = directory / "config.json"
    config = presets.tiny()
    del config["dspark_block_size"]
    file.write_text(json.dumps(config))
    _, draft, tensors = checks.checkpoint(directory, free_disk=0)
    assert (draft.state, tensors.state) == (State.NOTE, State.OK)
    file.write_text(json.dumps(presets.tiny() | {"model_type": "llama"}))
    (line,) = checks.checkpoint(directory, free_disk=0)
    assert line.state is State.PROBLEM
    assert "model_type must be 'deepseek_v4'" in line.found


def test_what_the_driver_prints_is_read():
    text = (
        "NVIDIA GeForce RTX 4090, 8.9, 24080, 24564, 580.1, 16, 16, 4\n"
        "NVIDIA H200, 9.0, 143000, 143771, 580.1, [N/A], [N/A], [N/A]\n"
        "No devices were found\n"
    )
    first, second = doctor.read_gpus(text)
    assert first == ADA._replace(free=24080 * MIB, total=24564 * MIB)
    assert second.capability == (9, 0)
    assert second[5:] == (None, None, None)
    assert doctor.read_gpus("") == []


def test_the_matrix_of_links_is_read():
    text = (
        " \x1b[4mGPU0\tGPU1\x1b[0m\t\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n\nLegend:\n\n"
        "  X    = Self\n  OK   = Status Ok\n"
    )
    assert doctor.read_links(text) == {(0, 1): True, (1, 0): False}
    assert doctor.read_links("") == {}


def test_available_memory():
    assert doctor.available_memory("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20
    assert doctor.available_memory("") == 0


def test_a_command_that_does_not_exist_prints_nothing():
    assert doctor.output("no-such-tool") == ""
    assert doctor.output("echo", "x") == "x\n"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "output", lambda *command: "")


def test_this_machine_has_no_problem(no_gpu, capsys, tiny_checkpoint):
    assert cli.main(["doctor", "--model", str(tiny_checkpoint), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == 0
    names = [line["name"] for line in said["checks"]]
    assert {"python", "torch", "triton", "sglang", "seams", "gpu", "compiler"} <= set(names)
    assert names[-3:] == ["model", "draft", "tensors"]


def test_a_problem_is_the_exit_status(no_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "machine", lambda: [checks.sglang("0.5.18")])
    assert cli.main(["doctor", "--model", str(tmp_path / "absent")]) == 1
    out = capsys.readouterr().out
    assert "problem  sglang       0.5.18\n" in out
    assert "-> pip install 'sglang==0.5.17'" in out
    assert out.endswith("2 problems\n")
