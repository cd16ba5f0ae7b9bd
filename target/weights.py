"""Weights of one tensor-parallel rank, loaded from the checkpoint and prepared for the kernels."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.kernels.hyper import HyperSite, prepare_hyper
from dspark.kernels.linear import Bf16Weight, Fp8Weight, prepare_bf16, prepare_fp8
from dspark.kernels.moe import ExpertWeights, prepare_experts
from dspark.target.checkpoint.formats import FP8_BLOCK
from dspark.target.checkpoint.ledger import Ledger
from dspark.target.checkpoint.names import (
    DRAFT_PREFIX,
    check_draft,
    draft_tensors,
    require_dspark,
    target_tensors,
)
from dspark.target.checkpoint.reader import Checkpoint, CheckpointError
from dspark.target.collect import Parts, collect_blocks
from dspark.target.config import ModelConfig
from dspark.target.sharding import Rank, check_tp


class CompressorWeights(NamedTuple):
    """Forms compressed entries of width Dh: 512 for attention, 128 for the indexer."""

    ape: torch.Tensor  # f32; C4 [8, Dh]: rows 0-3 for the A half, 4-7 for B; C128 [128, Dh]
    norm: torch.Tensor  # bf16 [Dh]


class AttentionWeights(NamedTuple):
    """H heads and G output groups of this rank; the compressors and the indexer are replicated.

    Matrices that multiply the same input are stacked, for one launch.
    """

    wqkv_a: Fp8Weight  # [q_lora_rank in whole blocks of 128 (rows of zeros) + 512, hidden]
    q_norm: torch.Tensor  # bf16 [q_lora_rank]
    wq_b: Fp8Weight  # [H * 512, q_lora_rank]; ratio 4: then [index heads * 128, q_lora_rank]
    kv_norm: torch.Tensor  # bf16 [512]
    wo_a: Fp8Weight  # [G * o_lora_rank, 512 * heads per group]
    wo_b: Fp8Weight  # [hidden, G * o_lora_rank]
    sink: torch.Tensor  # f32 [H]
    # Ratio 128 [kv 512 | score 512, hidden]. Ratio 4 [kv A | kv B | score A | score B 4*512], the
    # same of the indexer [4*128], and its head weights [index heads].
    wcompress: Bf16Weight | None
    compressor: CompressorWeights | None  # ratio 4 and 128
    index_compressor: CompressorWeights | None  # ratio 4

    @property
    def wkv(self) -> Fp8Weight:
        """[512, hidden], a view: what the draft injects needs no query."""
        blocks = self.kv_norm.shape[0] // FP8_BLOCK
        codes, scales, dense = self.wqkv_a
        rows = blocks * FP8_BLOCK
        return Fp8Weight(codes[-rows:], scales[-blocks:], None if dense is None else dense[-rows:])


class MoeWeights(NamedTuple):
    """I intermediate columns of this rank, J of them in the shared expert (I rounded up to 128)."""

    gate: Bf16Weight  # [experts, hidden]
    bias: torch.Tensor | None  # f32 [experts]; None in hash layers
    tid2eid: torch.Tensor | None  # i32 [vocab, k]; hash layers only
    experts: ExpertWeights
    shared_w13: Fp8Weight  # [2J, hidden]: gate rows, then up rows
    shared_w2: Fp8Weight  # [hidden, J]


class BlockWeights(NamedTuple):
    attn_norm: torch.Tensor  # bf16 [hidden]
    ffn_norm: torch.Tensor  # bf16 [hidden]
    hc_attn: HyperSite
    hc_ffn: HyperSite
    attn: AttentionWeights
    moe: MoeWeights


class TargetWeights(NamedTuple):
    embed: torch.Tensor  # bf16 [vocab / ranks, hidden]
    head: Bf16Weight  # [vocab / ranks, hidden]
    norm: torch.Tensor  # bf16 [hidden]
    hc_head: HyperSite
    blocks: list[BlockWeights]


class DraftWeights(NamedTuple):
    """The DSpark draft; `embed` and `head` are the target's."""

    main_proj: Fp8Weight  # [hidden, captured layers * hidden]
    main_norm: torch.Tensor  # bf16 [hidden]
    blocks: list[BlockWeights]
    norm: torch.Tensor  # bf16 [hidden]
    hc_head: HyperSite
    markov_w1: torch.Tensor  # bf16 [vocab, rank], replicated
    markov_w2: Bf16Weight  # [vocab / ranks, rank]
    confidence: torch.Tensor  # f32 [hidden + rank]


def load_target(
    source: str | Path | Checkpoint,
    config: ModelConfig,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
) -> TargetWeights:
    """Load one rank's target from a checkpoint directory; `mtp.*` shards stay closed.

    Raises:
        CheckpointError: a tensor is missing, unknown, of wrong shape or type, or a shard damaged.
        ConfigError: `tp_size` ranks cannot split this model.
    """
    checkpoint = _open(source)
    check_tp(config, tp_size)
    table = target_tensors(config)
    Ledger(table).expect(filter(_is_target, checkpoint.shard_of))
    rank = Rank(tp_rank, tp_size, torch.device(device))
    blocks: dict[str, BlockWeights] = {}
    for prefix, parts in collect_blocks(
        checkpoint.stored(_is_target), table, rank, config.n_routed_experts, "target"
    ):
        if prefix == "":
            top = parts
            continue
        layer = int(prefix.split(".")[1])
        ratio, hashed = config.compress_ratios[layer], config.is_hash_layer(layer)
        blocks[prefix] = _block(prefix, parts, ratio, hashed, config)
        parts.assert_empty()
    weights = TargetWeights(
        embed=top.take("embed.weight"),
        head=prepare_bf16(top.take("head.weight")),
        norm=top.take("norm.weight"),
        hc_head=_hyper_site(top, "hc_head"),
        blocks=[blocks[f"layers.{i}."] for i in range(config.num_hidden_layers)],
    )
    top.assert_empty()
    return weights


def load_draft(
    source: str | Path | Checkpoint,
    config: ModelConfig,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
) -> DraftWeights:
    """Load one rank's DSpark draft, opening only the shards that hold `mtp.*` tensors.

    Raises:
        ConfigError: the checkpoint has no DSpark draft, or `tp_size` ranks cannot split it.
        CheckpointError: as `load_target`.
    """
    checkpoint = _open(source)
    check_draft(config, checkpoint.shard_of)
    check_tp(config, tp_size)
    table = draft_tensors(config)
    Ledger(table).expect(filter(_is_draft, checkpoint.shard_of))
    rank = Rank(tp_rank, tp_size, torch.device(device))
    blocks, extras = {}, {}
    for prefix, parts in collect_blocks(
        checkpoint.stored(_is_draft), table, rank, config.n_routed_experts, "draft"
    ):
        blocks[prefix] = _block(prefix, parts, 0, False, config)
        extras[prefix] = parts
    stages = [f"mtp.{i}." for i in range(require_dspark(config).stages)]
    first, last = extras[stages[0]], extras[stages[-1]]
    weights = DraftWeights(
        main_proj=first.fp8("main_proj"),
        main_norm=first.take("main_norm.weight"),
        blocks=[blocks[stage] for stage in stages],
        norm=last.take("norm.weight"),
        hc_head=_hyper_site(last, "hc_head"),
        markov_w1=last.take("markov_head.markov_w1.weight"),
        markov_w2=prepare_bf16(last.take("markov_head.markov_w2.weight")),
        confidence=last.take("confidence_head.proj.weight").float().flatten(),
    )
    for stage in stages:
        extras[stage].assert_empty()
    return weights


def _open(source: str | Path | Checkpoint) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else Checkpoint(source)


def _is_draft(name: str) -> bool:
    return name.startswith(DRAFT_PREFIX)


def _is_target(name: str) -> bool:
    return not _is_draft(name)


def _block(
    prefix: str, parts: Parts, ratio: int, hashed: bool, config: ModelConfig
) -> BlockWeights:
    return BlockWeights(
        attn_norm=parts.take("attn_norm.weight"),
        ffn_norm=parts.take("ffn_norm.weight"),
        hc_attn=_hyper_site(parts, "hc_attn"),
        hc_ffn=_hyper_site(parts, "hc_ffn"),
        attn=_attention(parts, ratio),
        moe=_moe(prefix, parts, hashed, config),
    )


def _hyper_site(parts: Parts, name: str) -> HyperSite:
    return HyperSite(
        fn=prepare_hyper(parts.take(f"{name}_fn")),
        base=parts.take(f"{name}_base"),
        scale=parts.take(f"{name}_scale"),
    )


def _attention(parts: Parts, ratio: int) -> AttentionWeights:
    queries = ["attn.wq_b"] + (["attn.indexer.wq_b"] if ratio == 4 else [])
    return AttentionWeights(
        wqkv_a=_stacked_fp8(parts, ["attn.wq_a", "attn.wkv"]),
        q_norm=parts.take("attn.q_norm.weight"),
        wq_b=_stacked_fp8(parts, queries),
        kv_norm=parts.take("attn.kv_norm.weight"),
        wo_a=parts.fp8("attn.wo_a"),
        wo_b=parts.fp8("attn.wo_b"),
        sink=parts.take("attn.attn_sink"),
        wcompress=_compress_projections(parts, ratio),
        compressor=_compressor(parts, "attn.compressor", ratio) if ratio else None,
        index_compressor=_compressor(parts, "attn.indexer.compressor", 4) if ratio == 4 else None,
    )


def _compress_projections(parts: Parts, ratio: int) -> Bf16Weight | None:
    names = {
        0: [],
        4: ["compressor.wkv", "compressor.wgate", "indexer.compressor.wkv",
            "indexer.compressor.wgate", "indexer.weights_proj"],
        128: ["compressor.wkv", "compressor.wgate"],
    }[ratio]  # fmt: skip
    matrices = [parts.take(f"attn.{name}.weight") for name in names]
    return prepare_bf16(torch.cat(matrices)) if matrices else None


def _compressor(parts: Parts, module: str, ratio: int) -> CompressorWeights:
    ape = parts.take(f"{module}.ape")
    if ratio == 4:
        ape = torch.cat(ape.chunk(2, dim=1))  # [4, A | B] -> [A rows; B rows]
    return CompressorWeights(ape.contiguous(), parts.take(f"{module}.norm.weight"))


def _moe(prefix: str, parts: Parts, hashed: bool, config: ModelConfig) -> MoeWeights:
    shared = "ffn.shared_experts"
    return MoeWeights(
        gate=prepare_bf16(parts.take("ffn.gate.weight")),
        bias=None if hashed else parts.take("ffn.gate.bias"),
        tid2eid=_expert_ids(prefix, parts, config) if hashed else None,
        experts=_experts(prefix, parts),
        shared_w13=_stacked_fp8(parts, [f"{shared}.w1", f"{shared}.w3"]),
        shared_w2=prepare_fp8(*_padded_fp8(parts, f"{shared}.w2")),
    )


def _experts(prefix: str, parts: Parts) -> ExpertWeights:
    names = ("w13.weight", "w13.scale", "w2.weight", "w2.scale")
    try:
        return prepare_experts(*(parts.take(f"experts.{name}") for name in names))
    except ValueError as error:
        raise CheckpointError(f"{prefix}ffn.experts: {error}") from None


def _stacked_fp8(parts: Parts, modules: list[str]) -> Fp8Weight:
    """One matrix of several, each zero-filled to whole blocks so that the next keeps its scales."""
    padded = [_padded_fp8(parts, module) for module in modules]
    return prepare_fp8(*(torch.cat(halves) for halves in zip(*padded, strict=True)))


def _padded_fp8(parts: Parts, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, its rows (columns of a shared w2) zero-filled to whole blocks.

    A rank's part of the shared w1 may end inside a block; a zero gate row times a zero w2 column
    adds nothing. The hidden width stays.
    """
    codes, scales = parts.take(f"{module}.weight"), parts.take(f"{module}.scale")
    rows, columns = codes.shape
    is_down = module.endswith("w2")
    padding = (0, -columns % FP8_BLOCK, 0, 0) if is_down else (0, 0, 0, -rows % FP8_BLOCK)
    return F.pad(codes.view(torch.uint8), padding).view(codes.dtype), scales


def _expert_ids(prefix: str, parts: Parts, config: ModelConfig) -> torch.Tensor:
    ids = parts.take("ffn.gate.tid2eid")
    if ids.min() < 0 or ids.max() >= config.n_routed_experts:
        raise CheckpointError(
            f"Tensor {prefix}ffn.gate.tid2eid names an expert "
            f"outside 0..{config.n_routed_experts - 1}."
        )
    return ids.to(torch.int32)
