"""Grammar masks of verify rows: one per row, along the candidates."""

from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask


def start_copy(batch: Any, candidates: torch.Tensor) -> GrammarTree | None:
    """Start copying candidates i64 [R, V] to the host, where grammars live."""
    return GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None


def mask(batch: Any, tree: GrammarTree | None, device: torch.device, barrier: Any) -> Any:
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
