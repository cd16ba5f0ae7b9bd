"""Sampling as SGLang's batch describes it: parameters, grammars, adjustments, log probabilities."""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB, apply_custom_logit_processor
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from dspark.speculation.penalties import any_penalised
from dspark.speculation.sampling import RequestParams, Requests, request_seed

HOTTEST = 1e30  # beyond this the noise would overflow; all tokens are equally likely long before


def requests_of(batch: Any, seed: torch.Tensor, seeded: torch.Tensor) -> Requests:
    """A decode batch (SGLang's ScheduleBatch) as the steps see it.

    Args:
        seed, seeded: i64, bool [slots] of every request slot.
    """
    slot = batch.req_pool_indices
    return Requests(
        slot,
        batch.seq_lens.to(torch.int64),
        batch.spec_info.bonus_tokens.to(torch.int64),
        seed[slot],
        seeded[slot],
        sum(_samples_without_seed(req.sampling_params) for req in batch.reqs),
        request_params(batch.sampling_info),
    )


def request_params(info: Any) -> RequestParams:
    """Read SGLang's SamplingBatchInfo; a greedy request arrives as top_k 1."""
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    top_k = info.top_ks.view(-1)
    return RequestParams(
        torch.where(top_k <= 1, 0.0, info.temperatures.view(-1).float().clamp(max=HOTTEST)),
        top_k,
        info.top_ps.view(-1),
        info.min_ps.view(-1),
        bool(info.is_all_greedy),
        bool(cut),
    )


def is_sampled(params: Any) -> bool:
    """params: SGLang's SamplingParams of one request; a greedy one arrives as top_k 1."""
    return params.top_k > 1


def _samples_without_seed(params: Any) -> bool:
    return is_sampled(params) and params.sampling_seed is None


def seeds_of(reqs: Sequence[Any], server_seed: int) -> torch.Tensor:
    """i64 [R] on the host: what each request draws its tokens by."""
    seeds = [request_seed(server_seed, req.rid, req.sampling_params.sampling_seed) for req in reqs]
    return torch.tensor(seeds, dtype=torch.int64)


def grammar_tree(batch: Any, candidates: torch.Tensor) -> GrammarTree | None:
    """Start copying candidates i64 [R, V] to the host, where grammars live."""
    return GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None


def grammar_mask(batch: Any, tree: GrammarTree | None, device: torch.device, barrier: Any) -> Any:
    """SGLang's GrammarMask of R * V rows, or None; waits for the previous step's tokens."""
    if tree is None:
        return None
    return build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=device,
        barrier=barrier,
    )


def only_chooses(batch: Any, mask: Any) -> bool:
    """Whether tokens are chosen from the logits as the model gives them, and nothing else is."""
    info = batch.sampling_info
    return not (
        mask is not None
        or info.logit_bias is not None
        or info.has_custom_logit_processor
        or batch.return_logprob
        or any_penalised(batch.reqs)
    )


def adjust(logits: torch.Tensor, info: Any, mask: Any) -> None:
    """Add grammar mask, bias and custom processors in place (penalties come before them).

    Args:
        logits: f32 [R, V, N].
        info: SamplingBatchInfo of the R requests.
        mask: GrammarMask of R * V rows, or None.
    """
    if mask is not None:
        mask.apply(logits.view(-1, logits.shape[-1]))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[:, None])
    if info.has_custom_logit_processor:
        # Processors expect one row per request, in the order of their parameters.
        for row in logits.unbind(1):
            apply_custom_logit_processor(row, info)


def store_logprobs(logits_output, logits: torch.Tensor, tokens: torch.Tensor, batch) -> None:
    """Store what the requests want to know about `tokens` in SGLang's result.

    Args:
        logits: f32 [R * rows, N] adjusted logits, before top-k and the like.
        tokens: i64 [R, rows]; row j of the logits chose token j.
        batch: ScheduleBatch of the R requests.
    """
    store_logprobs_of(
        logits_output,
        logits,
        tokens,
        batch.sampling_info,
        batch.top_logprobs_nums,
        batch.token_ids_logprobs,
    )


def store_logprobs_of(
    logits_output, logits: torch.Tensor, tokens: torch.Tensor, info, top_nums, token_ids
) -> None:
    """`store_logprobs` for a batch known by its SamplingBatchInfo and what each request asks."""
    rows = tokens.shape[1]
    values = _log_probabilities(logits, info, rows)
    result = OutputLogprobProcessor().compute_logprobs(
        values,
        [n for n in top_nums for _ in range(rows)],
        [ids for ids in token_ids for _ in range(rows)],
        tokens.flatten(),
    )
    result.write_output_to(logits_output)
    if rows > 1:
        flat = logits_output.next_token_logprobs
        logits_output.next_token_logprobs = flat.view(tokens.shape)


def _log_probabilities(logits: torch.Tensor, info, rows: int) -> torch.Tensor:
    """f32 [R * rows, N], each row by itself.

    SGLang has another formula for a batch in which any request samples, so that the last bits of a
    request's values would depend on its neighbours.
    """
    if SGLANG_RETURN_ORIGINAL_LOGPROB:
        return torch.log_softmax(logits, -1)
    temperatures = info.temperatures.repeat_interleave(rows, 0)  # 1 for a greedy request
    return torch.log_softmax(logits / temperatures, -1)
