"""What a measured table holds for, and that all ranks take the first one's."""

import json
from types import SimpleNamespace

import pytest

from dspark.host import step_costs
from dspark.speculation import step_cost_cache
from dspark.speculation.step_cost import Steps

COST = (Steps(1, (1, 6), (0.010, 0.020), 0.0075),)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"layers": 4}')
    (tmp_path / "model" / "weights").write_bytes(b"12345")
    return tmp_path / "model"


def arguments(model, **changed):
    flags = {name: 1 for name in step_costs.FLAGS}
    draft = {"model_path": str(model), "speculative_draft_model_path": None}
    return SimpleNamespace(**flags | draft | changed)


def test_a_description_is_json_and_the_same_at_the_next_start(model):
    described = step_costs.describe(arguments(model), "cpu")
    assert json.loads(json.dumps(described)) == described
    assert step_costs.describe(arguments(model), "cpu") == described
    assert described["machine"]["cores"] >= 1


@pytest.mark.parametrize("flag", step_costs.FLAGS)
def test_a_flag_that_changes_steps_changes_the_description(model, flag):
    assert step_costs.describe(arguments(model), "cpu") != step_costs.describe(
        arguments(model, **{flag: 2}), "cpu"
    )


@pytest.mark.parametrize("variable", step_costs.VARIABLES)
def test_so_does_a_variable(model, monkeypatch, variable):
    before = step_costs.describe(arguments(model), "cpu")
    monkeypatch.setenv(variable, "other")
    assert step_costs.describe(arguments(model), "cpu") != before


def test_so_does_the_checkpoint_or_a_draft_of_its_own(model):
    before = step_costs.describe(arguments(model), "cpu")
    with_draft = arguments(model, speculative_draft_model_path="a/draft")
    assert step_costs.describe(with_draft, "cpu")["checkpoints"][1] == {"path": "a/draft"}
    (model / "weights").write_bytes(b"123456")
    longer = step_costs.describe(arguments(model), "cpu")
    (model / "config.json").write_text('{"layers": 5}')
    deeper = step_costs.describe(arguments(model), "cpu")
    assert before != longer != deeper != before


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_take_the_table_of_the_first(monkeypatch, rank):
    """Rank 1 has another file, or none: it does not look."""
    looked = []
    monkeypatch.setattr(step_cost_cache, "find", lambda which: looked.append(which) or COST)
    sent = []

    def broadcast(cost):
        sent.append(cost)
        return COST

    monkeypatch.setattr(
        step_costs, "get_tp_group", lambda: SimpleNamespace(broadcast_object=broadcast)
    )
    group = SimpleNamespace(rank=lambda: rank)
    assert step_costs.find_kept({"a": 1}, group) == COST
    assert sent == ([COST] if rank == 0 else [None])
    assert looked == ([{"a": 1}] if rank == 0 else [])
