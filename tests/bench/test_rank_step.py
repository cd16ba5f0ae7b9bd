"""The projected step of eight ranks: what its sums launch, receive and take, by hand."""

import pytest

from dspark.bench import rank_step
from dspark.bench.rank_step import gathered, messages, through_host
from dspark.commands import projection
from dspark.commands.plan import plan_memory
from dspark.host.memory_budget import GIB, Wishes
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig

FLASH = ModelConfig.from_hf(presets.flash())


@pytest.fixture(scope="module")
def load():
    return plan_memory(FLASH, 8, int(23.5 * GIB), Wishes(), drafts=True).load


def test_one_sum_by_hand():
    """Six rows are 48 KB: seven times that, seven eighths of it twice, or twice all of it."""
    assert gathered(6, 4096)[:2] == (2, 7 * 49_152)
    assert messages(6, 4096)[:2] == (5, 2 * 7 * 49_152 / 8)
    assert messages(2, 4096) == gathered(2, 4096)
    assert through_host(6, 4096)[:2] == (1, 2 * 49_152)
    assert through_host(1, 4096)[:2] == (1, 8 * 8192)
    # 1.2 + (1.1 + 2 * 1.24) us, and 64 KB at 23 GB/s
    assert through_host(1, 4096).seconds == pytest.approx(4.78e-6 + 65_536 / 23e9)
    assert through_host(6, 4096).seconds == pytest.approx(8.36e-6 + 98_304 / 23e9)


def test_sums_of_a_step_by_hand(load):
    """43 layers sum twice, and the embedding once; three stages likewise."""
    plain = rank_step.sums_of(load._replace(verify_width=1), 1, gathered)
    assert plain[:3] == (87, 174, 87 * 7 * 8192)
    drafting = rank_step.sums_of(load, 1, through_host)
    assert drafting[:3] == (87 + 7, 94, 87 * 12 * 8192 + 7 * 10 * 8192)


@pytest.mark.parametrize("width", [1, 6])
def test_messages_are_what_plan_projects(load, width):
    of_mode = load._replace(verify_width=width)
    for requests in (1, 8):
        step = projection.step(of_mode, 1008e9, requests, 4096)
        sums = rank_step.sums_of(of_mode, requests, messages)
        assert sums.seconds == pytest.approx(step.summing)


def test_a_record_is_read_between_its_rows():
    known = {1: 8.0, 6: 12.0, 48: 54.0}
    record = {"figures": [{"rows": r, "late_us_pcie4": us} for r, us in known.items()]}
    how = rank_step.as_measured(record)
    assert how(1, 4096).seconds == pytest.approx(8e-6)
    assert how(40, 4096).seconds == pytest.approx(46e-6)
    assert how(40, 4096).launches == 1


def test_every_line_says_what_it_assumes(load, capsys):
    assert rank_step.main([]) == 0
    said = capsys.readouterr().out
    assert said.count("assumed: ") == len(rank_step.assumptions(load, 1008e9, None))
    assert len(said.splitlines()) == said.count("assumed: ") + 1 + 2 * 2 * 3
