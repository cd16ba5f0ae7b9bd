"""The words in which a GPU holds MXFP4 weights, decoded bit by bit as `products._decoded` does."""

import pytest
import torch
from weight_cases import generator

from dspark.kernels.moe import dequantise_mxfp4, prepare_experts, words
from dspark.kernels.moe.words import (
    PLACES,
    SCALE_OFFSET,
    block_columns,
    gates_and_ups_in_turn,
    stream_scales,
    stream_words,
    streamed,
    tiled,
)


def test_every_bit_of_a_word_has_one_place():
    low = [place for places in PLACES for place in places]
    assert sorted(low + [(place + 16) % 32 for place in low]) == list(range(32))


def pairs_of(word: int) -> list[int]:
    """The four pairs of bf16 codes that rotations, masks and one multiplication show."""

    def rotated(by: int) -> int:
        return (word >> by | word << (32 - by)) & 0xFFFFFFFF

    gathered = (word & 0x001B001B) * 0x1084 & 0xFFFFFFFF
    return [bits & 0x81C081C0 for bits in (rotated(0), rotated(3), rotated(6), gathered)]


def test_words_decode_to_the_weights():
    packed = torch.randint(0, 256, (3, 48), generator=generator(1), dtype=torch.uint8)
    want = dequantise_mxfp4(packed, torch.full((3, 3), 127, dtype=torch.uint8))
    got = torch.empty_like(want)
    for row, line in enumerate(stream_words(packed).tolist()):
        for at, word in enumerate(line):
            group, i = divmod(at, 4)
            for quarter, pair in enumerate(pairs_of(word & 0xFFFFFFFF)):
                for half in range(2):
                    bits = torch.tensor(pair >> 16 * half & 0xFFFF, dtype=torch.uint16)
                    code = bits.view(torch.bfloat16).double() * 2.0**126
                    got[row, 32 * group + 8 * quarter + 2 * i + half] = code
    assert torch.equal(got, want)


def test_scales_bring_the_missing_power():
    scales = torch.arange(1, 129, dtype=torch.uint8)
    factor = (stream_scales(scales).to(torch.int32) << 23).view(torch.float32).double()
    assert torch.equal(factor, 2.0 ** (scales.double() - 127 + SCALE_OFFSET))
    assert stream_scales(torch.zeros(1, dtype=torch.uint8)).item() == 0


def test_tiles_lie_one_after_another():
    """48 rows of 192 columns: three rows of tiles, of which each has two blocks of 128 columns."""
    rows = torch.arange(48 * 6).view(1, 48, 6)  # a number for each group
    tiles = tiled(rows, 1)
    assert tiles.shape == (1, 3, 2, 16, 4)
    for row in (0, 15, 16, 47):
        for group in range(8):
            got = tiles[0, row // 16, group // 4, row % 16, group % 4]
            assert got == (rows[0, row, group] if group < 6 else 0)
    assert [block_columns(columns) for columns in (64, 192, 256, 4096)] == [128, 128, 256, 256]


def test_a_tile_has_eight_gates_and_eight_ups():
    order = gates_and_ups_in_turn(torch.arange(64).view(1, 64, 1)).flatten().tolist()
    assert order[:24] == [*range(8), *range(32, 40), *range(8, 16)]
    assert sorted(order) == list(range(64))


def test_experts_are_rearranged_alone_as_together(monkeypatch):
    packed = torch.randint(0, 256, (5, 32, 96), generator=generator(2), dtype=torch.uint8)
    together = words.tiled_words(packed)
    monkeypatch.setattr(words, "PASS_BYTES", 2 * 32 * 96)
    assert torch.equal(words.tiled_words(packed), together)


def test_the_sizes_survive_the_filling():
    shapes = [(2, 128, 96), (2, 128, 6), (2, 192, 32), (2, 192, 2)]
    experts = streamed(*(torch.zeros(shape, dtype=torch.uint8) for shape in shapes))
    assert (experts.hidden, experts.width) == (192, 64)


def test_a_scale_above_two_is_refused():
    one = torch.full((1, 128, 2), 127, dtype=torch.uint8)
    w = torch.zeros(1, 128, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale is 2\^2; scales above 2"):
        prepare_experts(w, one + 2, w[:, :64], one[:, :64])
