"""Compile what prompts launch, before the first prompt has to wait for it.

Decode and verify steps are compiled when their CUDA graphs are captured; prompts run outside of
graphs, and Triton compiles a kernel when it first meets a shape class.
"""

import logging
import time

import torch

from dspark.target.config import ModelConfig
from dspark.target.local import LocalTarget, Rows
from dspark.target.weights import TargetWeights

# Every tile height of the linears and experts, with a row count that is a multiple of 16 and one
# that is not: Triton makes two kernels of these.
ROW_COUNTS = (5, 16, 17, 32, 70, 80, 100, 112)
logger = logging.getLogger(__name__)


@torch.no_grad()
def compile_prompt_kernels(
    weights: TargetWeights, config: ModelConfig, device: torch.device
) -> None:
    """Run one prompt of each of ROW_COUNTS lengths through memory of its own.

    `weights` may be one rank's part: nothing is reduced over ranks, and the output is dropped.
    Takes a minute where Triton's cache is empty, about a second where it is not.
    """
    started = time.monotonic()
    model = LocalTarget(weights, config, max_tokens=max(ROW_COUNTS), device=device)
    for rows in ROW_COUNTS:
        out = model.forward([Rows(0, 0, [0] * rows)], store_all=False)
        model.logits(out.hidden[-1:])
    logger.info("Compiled the kernels of prompts in %.1f s.", time.monotonic() - started)
