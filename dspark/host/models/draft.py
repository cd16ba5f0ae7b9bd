"""`DeepseekV4ForCausalLMDSpark` as SGLang sees it: a thin shell around `dspark.target.draft`."""

import os
from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from dspark.host.models.target import Embedding, LmHead, tensor_parallel_group
from dspark.target.config import ModelConfig
from dspark.target.draft import inject, run_block
from dspark.target.weights import DraftWeights, load_draft


class DeepseekV4ForCausalLMDSpark(nn.Module):
    """The draft; embedding and head are the target's."""

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        self.config = ModelConfig.from_checkpoint(draft_directory())
        assert self.config.dspark is not None
        self.num_stages = self.config.dspark.stages  # SGLang sizes the draft pool by it
        self.rank, self.tp_size, self.group = tensor_parallel_group()
        self.device = torch.get_default_device()
        self.weights: DraftWeights
        self.embed_tokens: Embedding
        self.lm_head: LmHead

    def load_weights(self, weights: Iterable[tuple[str, None]]) -> None:
        """Load the `mtp.*` tensors.

        weights: the directory, once (`loading_hooks.hand_over_directory`).

        Raises:
            CheckpointError: a tensor is missing, unknown, repeated, or of wrong shape or type.
        """
        ((directory, _),) = weights
        self.weights = load_draft(directory, self.config, self.rank, self.tp_size, self.device)

    def attach_shared_modules(self, embed_tokens: Embedding, lm_head: LmHead) -> None:
        """Use the target's embedding and head."""
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        """i64 [R * gamma] -> logits of this rank's vocabulary shard and pre-norm hidden rows."""
        backend = get_attn_backend()
        out = run_block(
            self.embed_tokens(input_ids),
            input_ids,
            self.weights,
            self.lm_head.prepared,
            self.config,
            backend.forward_metadata,
            self.group,
        )
        return LogitsProcessorOutput(next_token_logits=out.logits, hidden_states=out.hidden)

    @torch.no_grad()
    def inject(
        self, captures: torch.Tensor, window_slot: torch.Tensor, pos: torch.Tensor, backend
    ) -> None:
        """Store draft latents of committed tokens (`dspark.target.draft.inject`)."""
        rope, caches = backend.rope, backend.layer_caches
        inject(captures, window_slot, pos, self.weights, self.config, rope, caches)


def draft_directory() -> str:
    """Local directory of the draft checkpoint; SGLang has read its config.json by now."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    path = args.speculative_draft_model_path or args.model_path
    if os.path.isdir(path):
        return path
    from huggingface_hub import snapshot_download

    revision = args.speculative_draft_model_revision or args.revision
    return snapshot_download(path, revision=revision, local_files_only=True)


EntryClass = [DeepseekV4ForCausalLMDSpark]
