"""The DeepSeek-V4 target model in plain PyTorch: token ids and step metadata in, hidden rows out.

It knows nothing of SGLang. `dspark.host.models.target` wraps it for the server, tests call it
directly.
"""

from typing import NamedTuple

import torch

from dspark.kernels.hyper import stream_mean
from dspark.kernels.linear import bf16_linear, rms_norm
from dspark.target.attention import Forward, attention
from dspark.target.block import Site, block_sites, collapse_streams, through_sites
from dspark.target.config import ModelConfig
from dspark.target.weights import TargetWeights


class TargetOutput(NamedTuple):
    hidden: torch.Tensor  # [T, hidden] after the final norm
    captures: list[torch.Tensor]  # one [T, hidden] per captured layer, ascending layer


def run_layers(
    embedded: torch.Tensor,
    token_ids: torch.Tensor,
    w: TargetWeights,
    config: ModelConfig,
    forward: Forward,
    capture_layers: frozenset[int] = frozenset(),
    group=None,
) -> TargetOutput:
    """All blocks and the final norm.

    Args:
        embedded: [T, hidden] embeddings of `token_ids`.
        token_ids: i64 [T], for hash-routed layers; padded rows choose no experts, whatever theirs.
        capture_layers: layers whose output (mean over streams) the draft model wants.
        group: tensor-parallel process group or None.
    """
    token_ids = torch.where(forward.meta.row_req < 0, -1, token_ids)
    sites: list[Site] = []
    for layer, weights in enumerate(w.blocks):

        def attend(x, attn=weights.attn, layer=layer):
            return attention(x, attn, config, forward, layer)

        sites.extend(block_sites(token_ids, weights, config, attend))
    captures = []
    for done, streams in enumerate(through_sites(embedded, sites, config, group), start=1):
        if done % 2 == 0 and done // 2 - 1 in capture_layers:  # both sites of the layer have run
            captures.append(stream_mean(streams))
    hidden = rms_norm(collapse_streams(streams, w.hc_head, config), w.norm, config.rms_norm_eps)
    return TargetOutput(hidden, captures)


def logits(hidden: torch.Tensor, w: TargetWeights) -> torch.Tensor:
    """[T, hidden] -> f32 [T, vocab (this rank's shard)]."""
    return bf16_linear(hidden, w.head, out_dtype=torch.float32)
