"""A prompt that the pool can never start is refused at once, in both modes."""

import pytest
import requests
from serving.prompts import prompt
from serving.request_fuzz import sentence
from serving.test_target_only import CHUNKED

SPECULATE = ("--speculative-algorithm", "dspark")
TOKENS = 20


@pytest.mark.parametrize(
    "mode", [pytest.param((), id="target-only", marks=pytest.mark.deep), SPECULATE]
)
def test_it_is_refused_and_blocks_nobody(serving, mode):
    """Failed before: it was taken, nothing was ever started again, and the scheduler spun."""
    server = serving((*CHUNKED, *mode, "--max-total-tokens", "1024"))
    before = server.generate(prompt(40, seed=1), TOKENS).ids
    for length in (513, 700, 1000):
        with pytest.raises(requests.HTTPError) as error:
            server.request(
                "/generate", {"input_ids": [7] * length, "sampling_params": {}}, timeout=60
            )
        assert error.value.response.status_code == 400
        assert sentence(error.value.response.json()) == (
            f"The prompt has {length} tokens, and at most 512 can be started: the pool holds 1024 "
            "tokens and a page of 256 stays in reserve; --max-total-tokens gives more."
        )
    assert len(server.generate([7] * 512, TOKENS).ids) == TOKENS
    assert server.generate(prompt(40, seed=1), TOKENS).ids == before
