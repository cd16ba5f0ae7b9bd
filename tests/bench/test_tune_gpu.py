"""The tuner on a real card, with few samples: that it runs, not what it finds."""

import json

import pytest
import torch

from dspark.bench.graph_time import copies_for, graph_time
from dspark.bench.tune.op import config_json, ops_of
from dspark.bench.tune.runner import EXIT, run_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUICK = {
    "--case-set": "smoke",
    "--warmup": "1",
    "--iters": "3",
    "--timing-min-ms": "1",
    "--timing-max-ms": "2",
}


@pytest.mark.parametrize(
    ("module", "op"),
    [
        ("dspark_schedule", "schedule.schedule"),
        ("sparse_decode", "attention.decode"),
        ("sparse_prefill", "attention.prefill"),
        ("moe", "moe.gate_up.few"),
        ("fp8_linear", "linear.fp8.few"),
    ],
)
def test_a_short_session_ends_with_a_verdict(module, op, tmp_path):
    program = f"dspark.bench.tune.{module}"
    first_two = tmp_path / "candidates.json"
    chosen = next(o for o in ops_of(program) if o.name == op)
    first_two.write_text(json.dumps([config_json(c) for c in chosen.candidates[:2]]))
    out = tmp_path / "out"
    argv = ["--output", str(out), "--op", op, "--candidates", str(first_two)]
    argv += [word for option in QUICK.items() for word in option]
    status = run_module(program, argv)
    record = json.loads((out / "session.json").read_text())
    assert status == EXIT[record["status"]]
    assert record["status"] != "error", record["note"]
    assert record["candidates"][0]["id"] == "control"
    assert record["candidates"][0]["geomean"] == pytest.approx(1.0, abs=0.1)
    assert all(c["parity"] != "failed" for c in record["candidates"])


def test_graph_time_of_a_copy_is_near_its_bytes():
    source = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    assert copies_for(source.nbytes) == 1
    assert 20 < graph_time(lambda _: target.copy_(source), chain=2) < 20_000
