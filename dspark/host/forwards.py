"""The two forwards of a decode step: the draft's block, and the target's verify rows.

Shapes depend on the batch size only, so both run inside CUDA graphs, unless verify rows are packed.
"""

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dspark.speculation.packing import Packing
from dspark.speculation.sampling import Requests


def run_draft_block(
    runner: Any, batch: Any, requests: Requests, token_ids: torch.Tensor, block_info: Any
) -> Any:
    """SGLang's LogitsProcessorOutput of the block rows: logits and pre-norm hidden states.

    Args:
        runner: the draft's ModelRunner.
        token_ids: i64 [R * gamma], block after block.
        block_info: SGLang's description of a block (`make_draft_block_spec_info`).
    """
    count = requests.slot.shape[0]
    row = torch.arange(token_ids.shape[0] // count, device=token_ids.device)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=count,
        input_ids=token_ids,
        req_pool_indices=requests.slot,
        seq_lens=batch.seq_lens,
        out_cache_loc=torch.zeros_like(token_ids),  # the backend finds the slots itself
        seq_lens_sum=None,
        seq_lens_cpu=None,
        positions=(requests.committed[:, None] + row).flatten(),
        spec_algorithm=SpeculativeAlgorithm.DSPARK,
        spec_info=block_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    return runner.forward(forward_batch).logits_output


def run_verify_rows(
    worker: Any,
    batch: Any,
    candidates: torch.Tensor,
    position: torch.Tensor,
    token_slot: torch.Tensor,
    packing: Packing | None,
) -> GenerationBatchResult:
    """Target forward of all R * V rows, or of the T rows of a packing.

    Args:
        worker: the target's model worker.
        candidates: i64 [R, V].
        position, token_slot: i64 [R, V] positions of the rows and their slots in the full pool.
    """

    def launched(by_row: torch.Tensor) -> torch.Tensor:
        return by_row.flatten() if packing is None else packing.pack(by_row.flatten())

    rows = DFlashVerifyInput(
        draft_token=launched(candidates),
        positions=launched(position),
        draft_token_num=candidates.shape[1],
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=None,
    )
    batch.out_cache_loc = launched(token_slot)
    forward_batch, _ = rows.prepare_for_verify(batch, worker)
    return worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
