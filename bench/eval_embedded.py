"""Acceptance and calibration of the embedded checkpoint as it is served.

    python -m dspark.bench.eval_embedded bench/results/embedded-acceptance.json

A server completes code, prose and Chinese at temperatures 0 and 1 and records every verified
block: the confidence logits, and how many drafts the target accepted. The calibration that ships
with the checkpoint was fitted on other prompts, so its error is measured on fresh text. So few
blocks show an error even where every prediction is right: `ece_by_chance` says how large.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark import embedded
from dspark.bench.environment import describe
from dspark.commands.local_server import LocalServer, ServerFailed
from dspark.speculation import calibration
from dspark.speculation.step_cost import TableError

TEMPERATURES = (0.0, 1.0)
CONCURRENT = 4
FLAGS = ["--speculative-algorithm", "dspark", "--max-running-requests", str(CONCURRENT)]


class Bin(NamedTuple):
    """Blocks whose predicted chance falls into one of 15 equal intervals."""

    predicted: float  # mean
    observed: float
    blocks: int


def survival(logits: torch.Tensor, temperatures: tuple[float, ...]) -> torch.Tensor:
    """f64 [n, gamma] chance that drafts 0..k are all accepted. logits: [n, gamma]."""
    return torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.float64)).cumprod(1)


def reliability(predicted: torch.Tensor, happened: torch.Tensor) -> list[Bin]:
    """Non-empty bins in ascending order. predicted: f64 [n] in [0, 1]; happened: bool [n]."""
    index = (predicted * calibration.BINS).long().clamp(max=calibration.BINS - 1)
    return [
        Bin(float(predicted[here].mean()), float(happened[here].double().mean()), int(here.sum()))
        for b in range(calibration.BINS)
        if (here := index == b).any()
    ]


def conditional(accepted: torch.Tensor, gamma: int) -> list[float | None]:
    """Chance of draft k given that all before it were accepted; None where none got so far."""
    reached = [int((accepted >= k).sum()) for k in range(gamma + 1)]
    return [reached[k + 1] / reached[k] if reached[k] else None for k in range(gamma)]


def chance_error(predicted: torch.Tensor, draws: int = 50) -> float:
    """Calibration error that a perfect prediction shows on average with so few blocks."""
    generator = torch.Generator().manual_seed(0)
    outcomes = (torch.bernoulli(predicted, generator=generator) > 0 for _ in range(draws))
    return (
        sum(calibration.expected_calibration_error(predicted, drawn) for drawn in outcomes) / draws
    )


def summarise(
    logits: torch.Tensor, accepted: torch.Tensor, temperatures: tuple[float, ...]
) -> dict[str, Any]:
    """Figures of verified blocks. logits: f64 [n, gamma]; accepted: i64 [n]."""
    gamma = logits.shape[1]
    plain, calibrated = survival(logits, (1.0,) * gamma), survival(logits, temperatures)
    happened = accepted[:, None] > torch.arange(gamma)

    def errors(predicted: torch.Tensor) -> list[float]:
        return [
            calibration.expected_calibration_error(predicted[:, k], happened[:, k])
            for k in range(gamma)
        ]

    return {
        "blocks": len(accepted),
        "accepted_length": 1 + float(accepted.double().mean()),
        "conditional": conditional(accepted, gamma),
        "ece": errors(plain),
        "ece_calibrated": errors(calibrated),
        "ece_by_chance": [chance_error(calibrated[:, k]) for k in range(gamma)],
        "reliability": reliability(plain.flatten(), happened.flatten()),
        "reliability_calibrated": reliability(calibrated.flatten(), happened.flatten()),
    }


def chunks(prompts: list[str], size: int) -> list[list[str]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def evaluate(server: LocalServer, samples: Path, tokens: int, temperatures: tuple[float, ...]):
    """Figures of every kind of text and temperature. samples: what `DSPARK_SAMPLES` names."""
    figures = {}
    for kind, prompts in embedded.held_out().items():
        for temperature in TEMPERATURES:
            samples.unlink(missing_ok=True)
            for batch in chunks(prompts, CONCURRENT):
                body = {
                    "text": batch,
                    "sampling_params": {
                        "temperature": temperature,
                        "max_new_tokens": tokens,
                        "ignore_eos": True,
                    },
                }
                server.request("/generate", body)
            name = f"{kind}, T={temperature:.0f}"
            figures[name] = summarise(*calibration.read_samples(samples), temperatures)
            print(name, f"{figures[name]['accepted_length']:.2f} tokens a step", flush=True)
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark.bench.eval_embedded")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens per prompt")
    arguments = parser.parse_args(argv)
    try:
        fitted = calibration.load(embedded.calibration(), gamma=5)
        with tempfile.TemporaryDirectory() as folder:
            samples = Path(folder) / "samples.jsonl"
            environment = {"DSPARK_SAMPLES": str(samples)}
            with LocalServer(embedded.checkpoint(), FLAGS, environment) as server:
                figures = evaluate(server, samples, arguments.tokens, fitted.temperatures)
    except (ServerFailed, TableError, OSError) as error:
        print(f"eval_embedded: {error}", file=sys.stderr)
        return 1
    record = {
        "environment": describe(FLAGS),
        "tokens_per_prompt": arguments.tokens,
        "prompts": {kind: len(texts) for kind, texts in embedded.held_out().items()},
        "calibration": fitted.temperatures,
        "figures": figures,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
