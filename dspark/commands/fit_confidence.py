"""`dspark fit-confidence`: calibrate the confidence head on blocks a server has verified.

Serve with `--dspark-samples samples.jsonl`, send it typical requests, then fit, and serve with
`--dspark-calibration` naming the result.
"""

import argparse
import sys

from dspark.speculation import calibration
from dspark.speculation.step_cost import TableError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dspark fit-confidence", description=__doc__)
    parser.add_argument("samples", help="file that --dspark-samples named")
    parser.add_argument("calibration", help="JSON file to write")
    parser.add_argument("--dataset", default="unnamed", help="what the requests were, for the file")
    arguments = parser.parse_args(argv)
    try:
        fitted = calibration.fit(*calibration.read_samples(arguments.samples), arguments.dataset)
        calibration.save(fitted, arguments.calibration)
    except (TableError, OSError) as error:
        print(f"dspark fit-confidence: {error}", file=sys.stderr)
        return 1
    print(f"{fitted.num_samples} blocks; drafts 1..k all accepted, predicted against observed:")
    print("k  temperature  error before  after")
    rows = zip(fitted.temperatures, fitted.ece_before, fitted.ece_after, strict=True)
    for k, (temperature, before, after) in enumerate(rows, start=1):
        print(f"{k}  {temperature:11.2f}  {before:12.4f}  {after:.4f}")
    return 0
