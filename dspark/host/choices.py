"""The `n` choices of one request: SGLang sends them one after the other, with one seed for all."""

import copy
from typing import Any

from dspark.speculation.sampling import choice_seed


def seed_choice(manager: Any, request: Any) -> None:
    """Give a choice of a seeded request a seed of its own: its number mixed into the request's.

    Args:
        manager: SGLang's TokenizerManager. It knows the choices of a request as its children, and
            sends one child before them that only fills the prefix cache.
        request: TokenizedGenerateReqInput about to be sent; its sampling parameters are shared
            with the other children.
    """
    parent = manager.child_rid_to_logical_rid.get(request.rid)
    if parent is None or request.sampling_params.sampling_seed is None:
        return
    state = manager.rid_to_state[parent]
    sent = getattr(state, "dspark_children_sent", 0)
    state.dspark_children_sent = sent + 1
    if sent > 0:
        params = copy.copy(request.sampling_params)
        params.sampling_seed = choice_seed(params.sampling_seed, sent - 1)
        request.sampling_params = params
