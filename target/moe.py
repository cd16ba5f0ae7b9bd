"""The expert layer: learned or hashed routing, MXFP4 experts, one always-on shared expert."""

import torch

from dspark.kernels.linear import bf16_linear, fp8_linear, swiglu_linear
from dspark.kernels.moe import moe_mxfp4, route
from dspark.target.config import ModelConfig
from dspark.target.weights import MoeWeights


def moe(
    x: torch.Tensor, token_ids: torch.Tensor, w: MoeWeights, config: ModelConfig
) -> torch.Tensor:
    """Routed plus shared experts of one layer.

    Args:
        x: [T, hidden] normed input rows.
        token_ids: i64 [T]; the first `num_hash_layers` layers pick experts by token id. Rows with
            -1 pick none: they get what the shared expert makes of them.

    Returns:
        [T, hidden] this rank's partial sum; the caller reduces over ranks.
    """
    logits = bf16_linear(x, w.gate, out_dtype=torch.float32)
    routed = route(
        logits,
        w.bias,
        w.tid2eid,
        token_ids,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    gate_up = fp8_linear(x, w.shared_w13, out_dtype=torch.float32)
    shared = swiglu_linear(
        gate_up, w.shared_w2, config.swiglu_limit, act_dtype=x.dtype, out_dtype=torch.float32
    )
    return moe_mxfp4(x, w.experts, routed, config.swiglu_limit, shared)
