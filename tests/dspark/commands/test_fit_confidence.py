"""`dspark fit-confidence`: samples in, calibration out."""

from confidence_samples import overconfident

from dspark.commands import fit_confidence
from dspark.speculation import calibration


def test_fit_confidence_writes_a_calibration(tmp_path, capsys):
    z, accepted = overconfident(500)
    calibration.SampleFile(tmp_path / "samples.jsonl").add(z, accepted)
    done = fit_confidence.main(
        [str(tmp_path / "samples.jsonl"), str(tmp_path / "calibration.json")]
    )
    assert done == 0
    assert calibration.load(tmp_path / "calibration.json", gamma=5).num_samples == 500
    assert "500 blocks" in capsys.readouterr().out


def test_fit_confidence_names_a_missing_file(tmp_path, capsys):
    assert fit_confidence.main([str(tmp_path / "none"), str(tmp_path / "calibration.json")]) == 1
    assert "Cannot read" in capsys.readouterr().err
