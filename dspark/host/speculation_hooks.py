"""Hooks: the worker that drafts, and the width of its blocks."""

from dspark.host import arguments
from dspark.host.ours import is_ours


def choose_worker(original, algorithm, server_args):
    if not (algorithm.is_dspark() and arguments.is_deepseek_v4(server_args)):
        return original(algorithm, server_args)
    from dspark.host.worker import DSparkWorker

    return DSparkWorker


def reserve_draft_block(original, server_args=None):
    """A draft block is written at its trained width, also where fewer drafts are verified."""
    from sglang.srt.runtime_context import get_server_args

    reserved = original(server_args)
    args = server_args or get_server_args()
    if args.speculative_algorithm != "DSPARK" or not arguments.is_deepseek_v4(args):
        return reserved
    return max(reserved, arguments.draft_block_size(args))


def draft_at_trained_width(original, algorithm, num_draft_tokens, is_draft_worker):
    """Rows of a request in a captured graph; a draft block is never narrower than trained."""
    rows = original(algorithm, num_draft_tokens, is_draft_worker)
    if not (algorithm.is_dspark() and is_draft_worker):
        return rows
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return arguments.draft_block_size(args) if arguments.is_deepseek_v4(args) else rows


def check_draft_request(original, req, enable_overlap):
    """SGLang refuses log probabilities for this family of drafts; our worker returns them."""
    if not is_ours():
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "DSpark returns no hidden states; ask a server without --speculative-algorithm."
    return None
