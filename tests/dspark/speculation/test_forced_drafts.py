"""Drafts that tests put in place of the model's."""

from types import SimpleNamespace

import pytest
import torch

from dspark.errors import UsageError
from dspark.speculation.forced_drafts import ForcedDrafts, nobody_drafts, right_drafts


def wish(kind, continuation=(), prompt=4):
    custom = None if kind is None else {"draft": kind, "continuation": list(continuation)}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), origin_input_ids=[0] * prompt
    )


def test_forced_drafts_follow_their_requests():
    forced = ForcedDrafts(slots=6, longest=32, depth=3, vocab=100, device="cpu")
    line = list(range(20, 40))
    kinds = ["oracle", "wrong", "wrong@2", "random", None]
    slot = torch.arange(1, 6)
    forced.admit(slot.tolist(), [wish(kind, line) for kind in kinds])
    model = torch.tensor([[7, 8, 9]] * 5)
    # The bonus token, output 5 of the request, sits at position 4 + 5: drafts start at output 6.
    tokens, certain = forced.replace(model, slot, torch.full((5,), 9))
    assert tokens[0].tolist() == [26, 27, 28]
    assert tokens[1].tolist() == [27, 28, 29]
    assert tokens[2].tolist() == [26, 27, 29]
    assert tokens[4].tolist() == [7, 8, 9]
    assert certain.tolist() == [True, True, True, True, False]


def test_a_batch_drafts_where_anybody_wants_to():
    none, own, oracle = wish("none"), wish(None), wish("oracle", [1])
    assert nobody_drafts([none, none])
    assert not nobody_drafts([none, own])
    assert not nobody_drafts([none, oracle])
    forced = ForcedDrafts(slots=3, longest=8, depth=3, vocab=100, device="cpu")
    forced.admit([1], [none])
    model = torch.tensor([[7, 8, 9]])
    tokens, certain = forced.replace(model, torch.tensor([1]), torch.tensor([9]))
    assert (tokens.tolist(), certain.tolist()) == ([[7, 8, 9]], [False])


@pytest.mark.parametrize("kind", ["orakel", "oracle@2", "wrong@", "wrong@x"])
def test_unknown_forced_drafts_are_named(kind):
    with pytest.raises(UsageError, match="oracle, wrong, wrong@k, random or none"):
        right_drafts(kind, 5)
