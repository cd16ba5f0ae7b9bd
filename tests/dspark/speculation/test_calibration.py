"""Temperatures of the confidence head, and the samples they are fitted on."""

import json

import pytest
import torch
from confidence_samples import overconfident

from dspark.speculation import calibration, step_cost


def test_calibration_finds_the_temperature_and_lowers_the_error():
    fitted = calibration.fit(*overconfident(), "synthetic")
    assert fitted.num_samples == 4000
    assert all(1.6 < t < 4.0 for t in fitted.temperatures[:3])
    assert all(a <= b for a, b in zip(fitted.ece_after, fitted.ece_before, strict=True))
    assert fitted.ece_after[0] < 0.5 * fitted.ece_before[0]


def test_calibrated_confidences_keep_their_temperature_of_one():
    fitted = calibration.fit(*overconfident(temperature=1.0), "synthetic")
    assert all(0.7 < t < 1.5 for t in fitted.temperatures[:3])


def test_calibration_error_by_hand():
    predicted = torch.tensor([0.01, 0.02, 0.99, 0.98], dtype=torch.float64)
    happened = torch.tensor([False, True, True, True])
    assert calibration.expected_calibration_error(predicted, happened) == pytest.approx(
        (abs(0.03 - 1) + abs(1.97 - 2)) / 4
    )


def test_calibration_survives_the_file_and_is_checked(tmp_path):
    fitted = calibration.fit(*overconfident(200), "synthetic")
    calibration.save(fitted, tmp_path / "calibration.json")
    assert calibration.load(tmp_path / "calibration.json", gamma=5) == fitted
    with pytest.raises(step_cost.TableError, match="calibrates 5 draft positions"):
        calibration.load(tmp_path / "calibration.json", gamma=4)
    broken = json.loads((tmp_path / "calibration.json").read_text()) | {
        "temperatures": [1, 1, 0, 1, 1]
    }
    (tmp_path / "calibration.json").write_text(json.dumps(broken))
    with pytest.raises(step_cost.TableError, match="not positive"):
        calibration.load(tmp_path / "calibration.json", gamma=5)


def test_samples_are_read_as_they_were_written(tmp_path):
    file = calibration.SampleFile(tmp_path / "samples.jsonl")
    file.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 0]))
    file.add(torch.tensor([[5.0, 6.0]]), torch.tensor([1]))
    logits, accepted = calibration.read_samples(tmp_path / "samples.jsonl")
    assert logits.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert accepted.tolist() == [2, 0, 1]
