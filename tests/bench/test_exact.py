"""The token-exact check without servers: what it compares, reports and returns."""

import contextlib
import json

import pytest

from dspark.bench import exact
from dspark.bench.exact import Gap
from dspark.bench.load import Target
from dspark.bench.prompts import PromptSet

RIGHT = 8


class Servers:
    """Servers 1, 2 are target-only and 3, 4 DSpark; output of prompt [i] is [i, 7, 8]."""

    def __init__(self):
        self.started: list[list[str]] = []
        self.asked: list[tuple[str, list[int]]] = []  # (server, first id of each prompt)
        self.contexts: list[list[int]] = []
        self.wrong: dict[tuple[str, int], int] = {}  # (server, prompt) -> third token

    @contextlib.contextmanager
    def own_server(self, model_path, flags):
        self.started.append(list(flags))
        yield Target(f"server {len(self.started)}")

    def answers(self, target, prompts, new_tokens, clients):
        self.asked.append((target.url, [prompt[0] for prompt in prompts]))
        return [[i, 7, self.wrong.get((target.url, i), RIGHT)] for (i,) in prompts]

    def top_two(self, target, context):
        self.contexts.append(context)
        return Gap([8, 9], [-0.5, -0.75])


async def flush_cache(target):
    return True


@pytest.fixture
def servers(monkeypatch):
    fake = Servers()
    for name in ("own_server", "answers", "top_two"):
        monkeypatch.setattr(exact, name, getattr(fake, name))
    monkeypatch.setattr(exact, "flush_cache", flush_cache)
    ids = [[0], [1], [2]]
    monkeypatch.setattr(exact, "prompts_of", lambda *_: PromptSet("code", ids, "f" * 64, "model"))
    return fake


@pytest.fixture
def run(servers, tmp_path):
    """Function (further arguments) -> (exit status, record)."""
    file = tmp_path / "exact.json"

    def main(*arguments):
        status = exact.main(["--model-path", "some/model", "--json", str(file), *arguments])
        return status, json.loads(file.read_text())

    return main


def test_two_cold_starts_a_mode_in_both_orders(run, servers):
    status, record = run()
    assert status == 0
    assert record["identical"]
    assert servers.started == [[], [], *[["--speculative-algorithm", "dspark"]] * 2]
    for number in (1, 2, 3, 4):
        orders = [ids for url, ids in servers.asked if url == f"server {number}"]
        assert orders == [[0, 1, 2], [2, 1, 0]]
    assert record["runs"][0] == "target-only start 1 forward"
    assert record["runs"][-1] == "DSpark start 2 reverse"
    assert record["tokens_compared"] == 8 * 3 * 3
    assert record["distinct_tokens"] == 5
    assert record["model"] == "model"
    assert servers.contexts == []


def test_a_difference_is_located_explained_and_fails(run, servers, capsys):
    servers.wrong["server 4", 1] = 9
    status, record = run()
    assert status == 1
    assert not record["identical"]
    assert len(record["differences"]) == 2  # in both orders of that start
    first = record["differences"][0]
    assert (first["prompt"], first["position"], first["expected"], first["found"]) == (1, 2, 8, 9)
    assert first["other"] == "DSpark start 2 forward"
    assert first["gap_nats"] == 0.25
    # The fifth server is target-only and is asked for the token after prompt and agreed output.
    assert servers.started[4] == []
    assert servers.contexts == [[1, 1, 7]] * 2
    assert "token 2 of prompt 1 is 8" in capsys.readouterr().out


def test_running_servers_take_part(run, servers):
    servers.wrong["http://peer", 0] = 5
    status, record = run("--server", "peer=http://peer/", "--starts", "3")
    assert status == 1
    assert record["runs"][-2:] == ["peer forward", "peer reverse"]
    assert len(record["runs"]) == 2 * 3 * 2 + 2
    assert {d["other"] for d in record["differences"]} == {"peer forward", "peer reverse"}
