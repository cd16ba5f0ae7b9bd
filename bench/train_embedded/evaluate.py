"""Phase 3: acceptance, calibration and samples on held-out text, with the training forward."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dspark.bench.train_embedded.acceptance import Blocks, measure, summarise
from dspark.bench.train_embedded.attention import build_ropes
from dspark.bench.train_embedded.config import dspark_of
from dspark.bench.train_embedded.data import HELD_OUT, Corpus, windows
from dspark.bench.train_embedded.generate import generate
from dspark.bench.train_embedded.linear import Numerics
from dspark.bench.train_embedded.parameters import prepare
from dspark.bench.train_embedded.session import step_generator
from dspark.bench.train_embedded.train_draft import observe
from dspark.speculation import calibration
from dspark.target.config import ModelConfig

Weights = dict[str, torch.Tensor]
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(",
)


@torch.no_grad()
def evaluate(
    target: Weights,
    draft: Weights,
    corpus: Corpus,
    config: ModelConfig,
    numerics: Numerics,
    device: torch.device,
    *,
    sequences: int,
    length: int,
    prompt: int,
    seed: int = 11,
) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Acceptance per held-out stream and temperature; STS fitted on one half, tested on the other.

    target, draft: masters. The blocks come along so that a calibration can be fitted to a mixture.
    """
    shared, drafted = prepare(target, numerics, True), prepare(draft, numerics, True)
    ropes = build_ropes(config, length + dspark_of(config).block_size, device)
    report: dict[str, Any] = {}
    measured: dict[str, Blocks] = {}
    for name in HELD_OUT:
        for temperature in (0.0, 1.0):
            generator = step_generator(seed, int(temperature), device)
            prompts = windows(corpus, name, sequences, prompt, generator)
            ids = generate(
                shared, prompts, length, torch.full((sequences,), temperature, device=device),
                ropes, config, numerics, generator,
            )  # fmt: skip
            sample = observe(shared, ids, config, ropes, numerics)
            blocks = measure(
                sample, prompt, temperature == 0, drafted, shared, ropes, config, numerics,
                generator,
            )  # fmt: skip
            measured[f"{name} T={temperature:.0f}"] = blocks
            half = len(blocks.accepted) // 2
            fitted = calibration.fit(blocks.confidence[:half], blocks.accepted[:half], name)
            report[f"{name} T={temperature:.0f}"] = summarise(blocks)._asdict() | {
                "temperatures": fitted.temperatures,
                "ece": calibration_errors(
                    blocks.confidence[half:], blocks.accepted[half:], fitted.temperatures
                ),
                "ece_uncalibrated": calibration_errors(
                    blocks.confidence[half:],
                    blocks.accepted[half:],
                    (1.0,) * len(fitted.temperatures),
                ),
            }
    return report, measured


def calibrate(measured: dict[str, Blocks]) -> calibration.Calibration:
    """STS for a mixture of all texts and temperatures: fitted on every second block of each.

    Its errors are those of the other blocks.
    """
    logits, accepted = (
        [torch.cat([getattr(b, field)[half::2] for b in measured.values()]) for half in (0, 1)]
        for field in ("confidence", "accepted")
    )
    fitted = calibration.fit(logits[0], accepted[0], " + ".join(measured))
    plain = (1.0,) * len(fitted.temperatures)
    return fitted._replace(
        ece_before=tuple(calibration_errors(logits[1], accepted[1], plain)),
        ece_after=tuple(calibration_errors(logits[1], accepted[1], fitted.temperatures)),
    )


def calibration_errors(
    logits: torch.Tensor, accepted: torch.Tensor, temperatures: tuple[float, ...]
) -> list[float]:
    """ECE of "rows 0..k all accepted" for each k. logits: f32 [n, gamma]; accepted: i64 [n]."""
    chance = torch.sigmoid(logits.double() / torch.tensor(temperatures, dtype=torch.float64))
    survival = chance.cumprod(1)
    return [
        calibration.expected_calibration_error(survival[:, k], accepted > k)
        for k in range(logits.shape[1])
    ]


@torch.no_grad()
def completions(
    target: Weights, tokenizer_file: Path, config: ModelConfig, numerics: Numerics,
    device: torch.device, length: int,
) -> dict[str, str]:  # fmt: skip
    """Greedy continuations of a few prompts, to read."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    weights = prepare(target, numerics, True)
    ropes = build_ropes(config, length, device)
    texts = {}
    for text in PROMPTS:
        ids = torch.tensor([[0, *tokenizer.encode(text).ids]], device=device)[:, : length - 1]
        out = generate(
            weights, ids, length, torch.zeros(1, device=device), ropes, config, numerics,
            step_generator(0, 0, device),
        )  # fmt: skip
        texts[text] = tokenizer.decode(out[0].tolist())
    return texts
