"""Result of the accept ops."""

from typing import NamedTuple

from torch import Tensor


class Accept(NamedTuple):
    """Outcome of one verify step; a step always emits at least one token."""

    accepted: Tensor  # i32 [R] drafts accepted, <= acceptable - 1
    bonus: Tensor  # i64 [R] the token after them, always a legal id
    commit_len: Tensor  # i32 [R] accepted + 1, rows that join the sequence; 0 if padded
    new_len: Tensor  # i64 [R] committed + commit_len
    trimmed: Tensor  # i32 [R] drafts that were right but lay beyond acceptable
    tokens: Tensor  # i64 [R, V] the accepted drafts, then the bonus, then zeros
