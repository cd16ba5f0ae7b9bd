"""A rank reads its own bytes and no others, and they are those of the whole tensors."""

import json
import logging
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dspark.target.checkpoint import presets, reader
from dspark.target.checkpoint.make import make_checkpoint
from dspark.target.checkpoint.names import TORCH_DTYPE, TensorSpec, checkpoint_tensors, total_bytes
from dspark.target.checkpoint.reader import Checkpoint, CheckpointError, Stored
from dspark.target.config import ModelConfig
from dspark.target.sharding import Rank, part_bytes, part_of, split_axis
from dspark.target.staging import Staging
from dspark.target.weights import load_draft, load_target

CPU = torch.device("cpu")
PRESET = presets.tiny() | {
    "num_attention_heads": 8,
    "o_groups": 4,
    "o_lora_rank": 128,
    "vocab_size": 512,
    "moe_intermediate_size": 512,
}
CONFIG = ModelConfig.from_hf(PRESET)
TABLE = checkpoint_tensors(CONFIG)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("parts") / "checkpoint"
    make_checkpoint(directory, PRESET, shard_bytes=1 << 20)
    return directory


@pytest.fixture
def taken(monkeypatch):
    """Bytes of every window that has been asked for, by tensor."""
    counts = {}
    original = Stored.windows

    def windows(self, part):
        for rows, window in original(self, part):
            counts[self.name] = counts.get(self.name, 0) + window.numel() * window.itemsize
            yield rows, window

    monkeypatch.setattr(Stored, "windows", windows)
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_those_of_the_whole_tensors(directory, ranks):
    """Compared with what safetensors itself reads, every tensor and every rank."""
    whole = {}
    for shard in directory.glob("*.safetensors"):
        whole |= load_file(shard)
    assert whole.keys() == TABLE.keys()
    for stored in Checkpoint(directory).stored(TABLE.get):
        for number in range(ranks):
            part = part_of(stored.name, TABLE, Rank(number, ranks, CPU))
            expected = whole[stored.name][part]
            into = torch.empty(expected.shape, dtype=expected.dtype)
            Staging(CPU).load(into, stored, part)
            assert into.view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_a_share_of_what_is_split_and_all_of_the_rest(directory, taken, caplog, ranks):
    split = sum(spec.nbytes for name, spec in TABLE.items() if split_axis(name) is not None)
    replicated = total_bytes(TABLE) - split
    assert split > replicated
    with caplog.at_level(logging.INFO):
        for number in range(ranks):
            taken.clear()
            load_target(directory, CONFIG, number, ranks)
            load_draft(directory, CONFIG, number, ranks)
            assert taken.keys() == TABLE.keys()
            assert sum(taken.values()) == replicated + split // ranks
    lines = [line for line in caplog.messages if line.startswith("Loaded the target")]
    assert len(lines) == ranks
    for number, line in enumerate(lines):
        assert f"rank {number} of {ranks} read" in line
        assert float(re.search(r"so far: (.*) GiB", line)[1]) > 0


def test_an_eighth_of_flash_and_what_every_rank_needs():
    """Of 155 GiB a rank of eight reads 20; at most a hundredth of the checkpoint is replicated."""
    table = checkpoint_tensors(ModelConfig.from_hf(presets.flash()))
    total = total_bytes(table)
    ranks = [sum(part_bytes(n, table, Rank(r, 8, CPU)) for n in table) for r in range(8)]
    assert total >> 30 == 155
    assert {share >> 30 for share in ranks} == {20}


@given(st.data())
def test_any_part_in_windows_of_any_size(tmp_path_factory, data):
    """Rows and columns of tensors at any place of a file, against slices of the whole."""
    file = tmp_path_factory.getbasetemp() / "one.bin"
    dtype = data.draw(st.sampled_from(sorted(TORCH_DTYPE)))
    shape = tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=2)))
    spec = TensorSpec(dtype, shape)
    start = data.draw(st.integers(0, 9000))
    generator = torch.Generator().manual_seed(start)
    raw = torch.randint(0, 256, (start + spec.nbytes,), dtype=torch.uint8, generator=generator)
    file.write_bytes(raw.numpy().tobytes())
    whole = raw[start:].clone().view(TORCH_DTYPE[dtype]).view(shape)
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    part = tuple(slice(*pair) for pair in bounds)
    row_bytes = spec.nbytes // shape[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "WINDOW", row_bytes * data.draw(st.integers(1, 80)))
        expected = whole[part]
        found = torch.zeros(expected.shape, dtype=expected.dtype)
        for rows, window in Stored("x", spec, file, start).windows(part):
            assert window.shape[0] * row_bytes <= reader.WINDOW
            found[rows].copy_(window)
    assert found.view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


def test_a_scale_that_is_no_number_is_found_by_the_rank_that_has_it(directory, tmp_path):
    """The last column of a down projection's scales is rank 1's."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    name = "layers.2.ffn.experts.1.w2.scale"
    shard = copy / Checkpoint(copy).shard_of[name]
    tensors = load_file(shard)
    tensors[name].view(torch.uint8)[0, -1] = 255
    save_file(tensors, shard)
    load_target(copy, CONFIG, 0, 2)
    with pytest.raises(CheckpointError, match=rf"^Tensor {name} contains scale byte 255"):
        load_target(copy, CONFIG, 1, 2)


@pytest.mark.parametrize(
    "offsets",
    [
        {"a": [0, 16], "b": [12, 28]},  # overlap
        {"a": [0, 16], "b": [20, 36]},  # a gap
        {"a": [0, 16], "b": [16, 28]},  # too small for its shape
    ],
)
def test_tensors_that_do_not_fill_their_places_are_named(tmp_path, offsets):
    entries = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": place}
        for name, place in offsets.items()
    }
    header = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=r"is damaged: tensor b does not fill its place\.$"):
        Checkpoint(tmp_path)
