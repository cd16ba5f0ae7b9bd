"""The command line that users copy, word for word, and what a server says of its memory."""

import shlex
from types import SimpleNamespace

import pytest
import requests

from dspark.bench import memory_card
from dspark.commands.local_server import LocalServer

DOCUMENTED = shlex.split(
    "--tp-size 1 --context-length 8192 --max-running-requests 8 --max-total-tokens 8192 "
    "--max-prefill-tokens 8192 --chunked-prefill-size -1 --mem-fraction-static 0.92 "
    "--swa-full-tokens-ratio 1.0 --kv-cache-dtype fp8_e4m3 --attention-backend dsv4 "
    "--moe-runner-backend marlin --cuda-graph-backend-decode full "
    "--cuda-graph-backend-prefill disabled --cuda-graph-max-bs-decode 8 "
    "--disable-custom-all-reduce"
)


def memory_of(server: LocalServer) -> dict:
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    return info["internal_states"][0]["dspark"]


def driven(server: LocalServer) -> None:
    """The drive of the memory benchmark, small: nothing is left in use, nothing fails."""
    options = SimpleNamespace(
        requests=12, longest_prompt=300, new_tokens=6, seed=3, alone=False, clients=6, vocab=512,
        flat_after=0, idle=0.0,
    )  # fmt: skip
    found = memory_card.observe(server, options)
    assert found["failures"] == []
    assert found["pools_at_start"] == found["pools_at_end"]
    assert found["alive_after_idle"]
    assert len(found["ids"]) >= 4
    assert memory_card.planned_against_measured(found["memory"]) is None  # there is no card


@pytest.mark.parametrize("mode", [[], ["--speculative-algorithm", "dspark"]])
def test_the_documented_command_line(changed_config, tmp_path, mode):
    directory = changed_config(lambda config: config.update(max_position_embeddings=8192))
    log = tmp_path / "log"
    with LocalServer(directory, [*DOCUMENTED, *mode], log=log) as server:
        said = memory_of(server)
        planned = said["memory"]["planned"]
        assert planned["tokens"] == 8192
        assert said["memory"]["requests"] == 8
        assert said["memory"]["context"] == said["memory"]["prompt_rows"] == 8192
        assert (planned["draft"] > 0) == bool(mode)
        assert planned["total"] == sum(planned.values()) - planned["tokens"] - planned["total"]
        assert said["routes"]["experts"] == "dequantised MXFP4"
        if mode:
            assert len(server.generate([5] * 6000, max_new_tokens=4).ids) == 4
        else:
            driven(server)
    text = log.read_text()
    assert "--moe-runner-backend marlin: the experts run in this package's own MXFP4" in text
    assert "Memory of each card: 8,192 tokens, 8 requests" in text


def test_a_card_of_given_size(tiny, tmp_path, run_serve, monkeypatch):
    """On a CPU the variable stands in for the card: pool and context follow from it."""
    monkeypatch.setenv("DSPARK_CARD_BYTES", str(100 << 20))
    done = run_serve("--model-path", str(tiny), "--device", "cpu")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dspark: This model needs")
    assert "but 0.10 GiB are free" in last
