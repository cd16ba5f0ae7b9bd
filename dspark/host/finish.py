"""When a request ends: tokens are tested one by one, in both modes by the same rules.

A decode step of DSpark accepts a run of tokens. Whatever comes first in the run ends the request,
and nothing behind it is looked at: the run is cut there, before SGLang sees it. Per token: a stop
string, a stop expression, a stop token, the end of the grammar, the length limit.

Two more things end a request with an error: a token that could not be chosen (the worker and the
target-only sampler emit BROKEN in its place), and one that the grammar does not admit.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    BaseFinishReason,
)

from dspark.speculation import ranks
from dspark.speculation.penalties import stop_ids
from dspark.speculation.sampling import BROKEN

PLACEHOLDER = 0  # the token the device goes on with in place of BROKEN


def take(req: Any, run: Sequence[int]) -> list[int]:
    """The tokens of `run` that the request takes; its grammar is advanced over these only.

    A token that cannot be taken leaves an error in `req.to_finish`. `req.output_ids` still lacks
    the run, and is left so.
    """
    before, taken = len(req.output_ids), []
    for token in run:
        if error := refusal(req, token):
            req.to_finish = req.to_finish or error
            break
        taken.append(token)
        req.output_ids.append(token)
        if end_with_last_token(req, req.grammar is not None and req.grammar.is_terminated()):
            break
    del req.output_ids[before:]
    return taken


def refusal(req: Any, token: int) -> BaseFinishReason | None:
    """Advance the grammar over `token`; the error to end with if that cannot be taken."""
    if token < BROKEN:
        ranks.raise_fault(token)
    if token == BROKEN:
        return no_choice(req)
    if req.grammar is None:
        return None
    try:
        req.grammar.accept_token(token)
    except ValueError:
        return _server_error("the token chosen for this request is not one its grammar admits")
    return None


def update_finish_state(req: Any, grammar_behind: bool) -> None:
    """In place of `Req.update_finish_state`; `req.output_ids` ends with the new tokens.

    Args:
        grammar_behind: the grammar has not seen the last token yet, as in target-only mode.
    """
    if req.finished():
        return
    ended = _settle_last_token(req, grammar_behind)
    if req.to_finish:
        req.finished_reason, req.to_finish = req.to_finish, None
    elif reason := end_with_last_token(req, ended):
        req.finished_reason = reason
        req.finished_len = min(len(req.output_ids), req.sampling_params.max_new_tokens)
    if req.finished_len is not None:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _settle_last_token(req: Any, grammar_behind: bool) -> bool:
    """Put an error for the last token into `req.to_finish`; whether it ends the grammar."""
    if not req.output_ids:
        return False
    last, grammar = req.output_ids[-1], req.grammar
    ended = grammar is not None and grammar.is_terminated()
    if last != BROKEN and (ended or not grammar_behind):
        return ended
    error = refusal(req, last)
    if error is None and grammar is not None:
        ended = grammar.is_terminated()
        grammar.rollback(1)  # SGLang advances it later
    if error is not None:
        req.output_ids[-1] = max(last, PLACEHOLDER)
        req.finished_len = len(req.output_ids) - 1
        req.to_finish = req.to_finish or error
    return ended


def end_with_last_token(req: Any, grammar_ended: bool) -> BaseFinishReason | None:
    """Why the request ends with its last token, those before having been tested; None if not."""
    limit = req.sampling_params.max_new_tokens
    if len(req.output_ids) <= limit:
        if reason := _stop(req):
            return reason
        if grammar_ended:
            return FINISH_MATCHED_TOKEN(matched=req.output_ids[-1])
    return FINISH_LENGTH(length=limit) if len(req.output_ids) >= limit else None


def _stop(req: Any) -> BaseFinishReason | None:
    """SGLang's own tests of one token, without what they leave behind."""
    req._check_str_based_finish(1)
    if not req.finished():  # an expression that cannot be evaluated finishes without a match
        req._check_token_based_finish(req.output_ids[-1:])
    reason, req.finished_reason, req.finished_len = req.finished_reason, None, None
    return reason


def no_choice(req: Any) -> FINISH_ABORT:
    """The error of a request none of whose tokens has a probability, with its reason if known."""
    done = len(req.output_ids) - (req.output_ids[-1:].count(BROKEN))
    if req.grammar is not None and not req.grammar.is_terminated():
        admitted = _admitted(req)
        if not admitted:
            return _client_error(f"The grammar admits no token after {done} tokens of output.")
        least = req.sampling_params.min_new_tokens
        if done < least and admitted <= stop_ids(req):
            return _client_error(
                f"After {done} tokens the grammar admits nothing but an end, "
                f"which min_new_tokens ({least}) forbids."
            )
    return _server_error("the model produced no usable logits for this request")


def _admitted(req: Any) -> set[int]:
    """Tokens that the grammar admits next."""
    mask = req.grammar.allocate_vocab_mask(vocab_size=req.vocab_size, batch_size=1, device="cpu")
    req.grammar.fill_vocab_mask(mask, 0)
    bits = (mask[0, :, None] >> torch.arange(32)) & 1  # word w, bit b: token 32 w + b
    return set(bits.flatten()[: req.vocab_size].nonzero()[:, 0].tolist())


def _client_error(sentence: str) -> FINISH_ABORT:
    return FINISH_ABORT(sentence, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _server_error(sentence: str) -> FINISH_ABORT:
    return FINISH_ABORT(sentence, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
