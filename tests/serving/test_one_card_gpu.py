"""Tensor parallelism on one GPU: real kernels, sums through host memory, eager steps.

What travels besides the sums goes over gloo, which no CUDA graph can hold; so no step is captured.
"""

import os
from pathlib import Path

import pytest
from serving.prompts import prompt
from serving.test_target_only import ids

from dspark.commands.local_server import LocalServer

pytestmark = [pytest.mark.gpu, pytest.mark.deep]

PROMPTS = [prompt(length, seed=length) for length in (5, 127, 300, 1000)]
TOKENS = 24
CARD_BYTES = 12 << 30  # of each rank
FLAGS = (
    "--disable-cuda-graph", "--disable-custom-all-reduce", "--context-length", "2048",
    "--max-running-requests", "4", "--max-total-tokens", "8192", "--skip-tokenizer-init",
)  # fmt: skip
DSPARK = ("--speculative-algorithm", "DSPARK")
SUMS = "host memory up to 64 rows, column slices from there on"


@pytest.fixture(scope="module")
def one_card(tmp_path_factory, checkpoint):
    """Function (further flags) -> LocalServer of two ranks on one card."""
    site = tmp_path_factory.mktemp("site")
    installed = site / "one_card-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: one-card\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\none_card = one_card:register\n"
    )
    places = [str(site), str(Path(__file__).parent / "one_card"), os.environ.get("PYTHONPATH", "")]
    env = {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1",
        "DSPARK_CARD_BYTES": str(CARD_BYTES),
    }
    logs = tmp_path_factory.mktemp("logs")

    def start(*flags: str) -> LocalServer:
        log = logs / f"{len(flags)}.log"
        flags = ("--tp-size", "2", *FLAGS, *flags)
        return LocalServer(checkpoint("none", "embedded"), flags, env, log, ready_s=400)

    return start


def answers(server: LocalServer) -> list[list[int]]:
    """Greedy and seeded, together and alone."""
    together = ids(server.generate_batch(PROMPTS, TOKENS))
    assert [server.generate(text, TOKENS).ids for text in PROMPTS[:2]] == together[:2]
    seeded = {"temperature": 1.0, "sampling_seed": 7, "top_k": 40}
    return together + ids(server.generate_batch(PROMPTS, TOKENS, **seeded))


def test_two_ranks_of_one_card(one_card):
    with one_card() as server:
        assert server.info()["internal_states"][0]["dspark"]["routes"]["rank_sums"] == SUMS
        truth = answers(server)
    assert [len(out) for out in truth] == [TOKENS] * len(truth)
    with one_card(*DSPARK) as server:
        assert answers(server) == truth
