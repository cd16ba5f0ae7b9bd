"""Which part of a checkpoint tensor a tensor-parallel rank keeps.

Heads, output groups, expert and vocabulary columns are split evenly; everything else, above all
the indexer (whose selection all ranks must share), is replicated.
"""

import re
from typing import NamedTuple

import torch

from dspark.target.checkpoint.formats import FP8_BLOCK
from dspark.target.checkpoint.names import Table
from dspark.target.config import ConfigError, ModelConfig

ROWS, COLUMNS = 0, 1
SPLIT_AXIS = {
    "embed": ROWS,
    "head": ROWS,
    "markov_head.markov_w2": ROWS,
    "attn.wq_b": ROWS,
    "attn.attn_sink": ROWS,
    "attn.wo_a": ROWS,
    "attn.wo_b": COLUMNS,
    "ffn.experts.w1": ROWS,
    "ffn.experts.w3": ROWS,
    "ffn.experts.w2": COLUMNS,
    "ffn.shared_experts.w1": ROWS,
    "ffn.shared_experts.w3": ROWS,
    "ffn.shared_experts.w2": COLUMNS,
}
_BLOCK_PREFIX = re.compile(r"^(layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"(?<=experts\.)\d+\.")


class Rank(NamedTuple):
    """One of `size` tensor-parallel ranks and the device its weights live on."""

    number: int
    size: int
    device: torch.device

    def part(self, length: int) -> slice:
        """This rank's share of `length` rows or columns."""
        share = length // self.size
        return slice(self.number * share, (self.number + 1) * share)


def check_tp(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless `size` ranks can split this model and its quantisation blocks."""
    for name in ("o_groups", "vocab_size", "moe_intermediate_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"Tensor parallel size {size} does not divide {name} {getattr(config, name)}."
            )
    width = config.moe_intermediate_size // size
    if width % 32:
        raise ConfigError(
            f"Tensor parallel size {size} leaves {width} of moe_intermediate_size, "
            "which is not a multiple of the MXFP4 group of 32."
        )
    blocked = {"moe_intermediate_size": width}
    blocked["o_groups * o_lora_rank"] = config.o_groups * config.o_lora_rank // size
    for name, share in blocked.items():
        if size > 1 and share % FP8_BLOCK and FP8_BLOCK % share:
            raise ConfigError(
                f"Tensor parallel size {size} leaves {share} of {name}, "
                f"which cuts through FP8 blocks of {FP8_BLOCK}."
            )


def split_axis(name: str) -> int | None:
    """Axis along which the ranks divide this checkpoint tensor; None where each keeps all of it."""
    local = _EXPERT.sub("", _BLOCK_PREFIX.sub("", name))
    return SPLIT_AXIS.get(local.removesuffix(".weight").removesuffix(".scale"))


def part_of(name: str, table: Table, rank: Rank) -> tuple[slice, ...]:
    """The rows, and of a matrix the columns, that this rank keeps of a tensor."""
    module, _, leaf = name.rpartition(".")
    part = [slice(0, length) for length in table[name].shape]
    axis = split_axis(name)
    if axis is None or rank.size == 1:
        return tuple(part)
    if leaf == "scale" and table[f"{module}.weight"].dtype == "F8_E4M3":
        # A rank's columns may start inside a block; they then all lie in that block.
        of_weight = rank.part(table[f"{module}.weight"].shape[axis])
        part[axis] = slice(of_weight.start // FP8_BLOCK, -(-of_weight.stop // FP8_BLOCK))
    else:
        part[axis] = rank.part(table[name].shape[axis])
    return tuple(part)


def part_bytes(name: str, table: Table, rank: Rank) -> int:
    lengths = [part.stop - part.start for part in part_of(name, table, rank)]
    return table[name]._replace(shape=tuple(lengths)).nbytes
