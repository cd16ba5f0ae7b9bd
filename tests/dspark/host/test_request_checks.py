"""Requests refused before a worker sees them."""

from types import SimpleNamespace

import pytest

from dspark.host.request_checks import check_request


def request(embeds=None, media=False):
    return SimpleNamespace(input_embeds=embeds, contains_mm_input=lambda: media)


@pytest.mark.parametrize("tokens", [[0], [511], [0, 7, 511], [], None])
def test_tokens_of_the_vocabulary_pass(tokens):
    check_request(request(), tokens, 512)


@pytest.mark.parametrize(("tokens", "named"), [([512], 512), ([3, -1], -1), ([5, 10**12], 10**12)])
def test_other_tokens_are_named(tokens, named):
    with pytest.raises(ValueError, match=f"Token id {named} is outside the vocabulary of 512"):
        check_request(request(), tokens, 512)


def test_only_tokens_are_served():
    with pytest.raises(ValueError, match="input_embeds"):
        check_request(request(embeds=[[0.0]]), None, 512)
    with pytest.raises(ValueError, match="images"):
        check_request(request(media=True), [1], 512)
