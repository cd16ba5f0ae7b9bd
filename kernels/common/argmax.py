"""A (value, token id) pair in one i64, so that the maximum is the argmax with ties to the smaller
id, on one rank or over many."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
# What a row without a single usable value packs to: below every real pair.
NOTHING = torch.iinfo(torch.int64).min


def pack(value: Tensor, token: Tensor) -> Tensor:
    """i64 whose order is (value ascending, token descending). NaN and -inf pack to NOTHING.

    value: f32. token: i64 in [0, 2^32), broadcasts against value.
    """
    bits = (value + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    packed = (ordered.long() << 32) | (_LOW - token)
    return torch.where(value > -torch.inf, packed, NOTHING)


def token_of(packed: Tensor) -> Tensor:
    """Token id of a packed pair; 0 for NOTHING."""
    return torch.where(packed == NOTHING, 0, _LOW - (packed & _LOW))


def pack_argmax(logits: Tensor, vocab_start: int = 0) -> Tensor:
    """Packed maximum of each row: f32 [..., shard] -> i64 [...]. Ids count from `vocab_start`."""
    clean = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    index = clean.argmax(-1, keepdim=True)  # the first of equals
    return pack(clean.gather(-1, index), index + vocab_start)[..., 0]
