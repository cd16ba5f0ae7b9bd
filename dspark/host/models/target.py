"""`DeepseekV4ForCausalLM` as SGLang sees it: a thin shell around `dspark.target.model`."""

from collections.abc import Iterable

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from dspark.host import rank_sums, tuned
from dspark.host.seams import check_worker
from dspark.kernels.collective import gather_vocab, tp_sum
from dspark.kernels.linear import Bf16Weight, bf16_linear
from dspark.target.config import ModelConfig
from dspark.target.model import run_layers
from dspark.target.weights import TargetWeights, load_target


class LmHeadMethod:
    """What SGLang's logits processor calls: the batch-invariant fp32 head GEMM."""

    def process_weights_after_loading(self, head: "LmHead") -> None:
        """SGLang asks every quantisation method; the loader has prepared the weight already."""

    def apply(
        self, head: "LmHead", hidden: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert bias is None
        return bf16_linear(hidden, head.prepared, out_dtype=torch.float32)


class LmHead(nn.Module):
    """Vocabulary head of this rank: [vocab / tp, hidden]."""

    def __init__(self, prepared: Bf16Weight):
        super().__init__()
        self.prepared = prepared
        self.weight = prepared.weight
        self.quant_method = LmHeadMethod()


class Embedding(nn.Module):
    """Vocabulary-sharded embedding; the sum over ranks is exact since one term is non-zero."""

    def __init__(self, table: torch.Tensor, first_token: int, group):
        super().__init__()
        self.table, self.first_token, self.group = table, first_token, group

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """i64 [T] -> [T, hidden]."""
        if self.group is None:
            return self.table[token_ids]
        local = token_ids - self.first_token
        mine = (local >= 0) & (local < self.table.shape[0])
        rows = self.table[local.clamp(0, self.table.shape[0] - 1)]
        return tp_sum(rows.masked_fill(~mine.unsqueeze(1), 0), self.group)


class ShardedLogits(LogitsProcessor):
    """SGLang's choice of rows; verify rows keep this rank's columns of the vocabulary.

    Greedy acceptance then needs 8 bytes a row of the other ranks instead of their logits, and who
    needs all columns gathers them (`dspark.host.worker`).
    """

    def __init__(self, config, group):
        super().__init__(config, skip_all_gather=True)
        self.group = group

    def _get_logits(self, hidden_states, lm_head, logits_metadata, *args, **kwargs):
        logits = super()._get_logits(hidden_states, lm_head, logits_metadata, *args, **kwargs)
        if logits_metadata.forward_mode.is_target_verify():
            return logits
        return gather_vocab(logits, self.group)


def tensor_parallel_group():
    """(rank, size, process group or None on one rank)."""
    group = get_tp_group()
    return (
        group.rank_in_group,
        group.world_size,
        group.device_group if group.world_size > 1 else None,
    )


class DeepseekV4ForCausalLM(nn.Module):
    """DeepSeek-V4 target; weights live in NamedTuples, not in nn.Parameters."""

    def __init__(self, config, quant_config=None, prefix: str = ""):
        # quant_config describes SGLang's own FP8 layers; ours read the checkpoint's scales.
        super().__init__()
        check_worker()  # this class is built even where the plugin could not be set up
        self.hf_config = config
        self.config = ModelConfig.from_hf(config)
        self.rank, self.tp_size, self.group = tensor_parallel_group()
        self.device = torch.get_default_device()
        tuned.load(self.device)  # before any launch; the draft runs in this process too
        self.logits_processor = ShardedLogits(config, self.group)
        self.capture_layers: frozenset[int] = frozenset()
        self.weights: TargetWeights
        self.embed_tokens: Embedding
        self.lm_head: LmHead

    def load_weights(self, weights: Iterable[tuple[str, None]]) -> None:
        """Take every target tensor of the checkpoint exactly once; `mtp.*` belongs to the draft.

        weights: the directory, once (`loading_hooks.hand_over_directory`).

        Raises:
            CheckpointError: a tensor is missing, unknown, repeated, or of wrong shape or type.
        """
        ((directory, _),) = weights
        self.weights = load_target(
            directory, self.config, self.rank, self.tp_size, device=self.device
        )
        shard = self.weights.embed.shape[0]
        self.embed_tokens = Embedding(self.weights.embed, self.rank * shard, self.group)
        self.lm_head = LmHead(self.weights.head)
        rank_sums.choose(self.group, self.device, self.config.hidden_size)

    def get_input_embeddings(self) -> Embedding:
        return self.embed_tokens

    def set_dspark_layers_to_capture(self, layer_ids: list[int]) -> None:
        """Layers whose outputs the draft model is conditioned on."""
        self.capture_layers = frozenset(layer_ids)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        """i64 [T] -> LogitsProcessorOutput; positions and slots come from the backend."""
        backend = get_attn_backend()
        out = run_layers(
            self.embed_tokens(input_ids),
            input_ids,
            self.weights,
            self.config,
            backend.forward_metadata,
            self.capture_layers,
            self.group,
        )
        return self.logits_processor(
            input_ids, out.hidden, self.lm_head, forward_batch, out.captures or None
        )


EntryClass = [DeepseekV4ForCausalLM]
