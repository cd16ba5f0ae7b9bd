"""A list as `eos_token_id` in config.json: each of its ids ends a request, in both modes."""

import json
import shutil

import pytest
from serving.prompts import prompt
from serving.test_dspark_requests import ask

from dspark.commands.local_server import LocalServer

PROMPT = prompt(30, seed=5)
ENDS = [279, 474]  # neither is the tokenizer's
PLACES = 8  # more than a block of 1 + 5 tokens
MODES = {
    "target-only": ((), {}),
    "dspark": (("--speculative-algorithm", "dspark"), {"DSPARK_FORCED_DRAFTS": "1"}),
}


def ending(place: int, end: int) -> dict:
    """Rules that bring the token `end` behind `place` others: it is wanted, and held back."""
    return {"min_new_tokens": place, "logit_bias": {str(end): 100.0}, "ignore_eos": False}


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES)
def test_every_id_of_a_list_ends_a_request_at_every_offset(tiny, tmp_path, mode):
    listed = tmp_path / "listed"
    shutil.copytree(tiny, listed)
    config = json.loads((listed / "config.json").read_text())
    (listed / "config.json").write_text(json.dumps(config | {"eos_token_id": ENDS}))

    flags, env = MODES[mode]
    with LocalServer(listed, flags, env, log=tmp_path / "server.log") as server:
        said = server.generate(PROMPT, PLACES).ids
        assert not {*ENDS} & {*said}
        for end in ENDS:
            for place in range(PLACES):
                expected = [*said[:place], end]
                drafts = {"draft": "oracle", "continuation": [*expected, *said]}
                rules = ending(place, end) | ({"custom_params": drafts} if env else {})
                answer = ask(server, [PROMPT], **rules)[0]
                assert answer["output_ids"] == expected, (place, end)
                reason = answer["meta_info"]["finish_reason"]
                assert reason == {"type": "stop", "matched": end}, (place, end)
        assert "Traceback" not in server.log()
