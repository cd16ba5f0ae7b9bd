"""The prompts that compile kernels at start: they reach every shape class and leave no trace."""

import torch

from dspark.kernels.linear.kernel import DECODE_ROWS
from dspark.kernels.moe.kernel import FEW_PAIRS, MANY_PAIRS
from dspark.target import warm_up
from dspark.target.checkpoint import presets
from dspark.target.config import ModelConfig
from dspark.target.local import LocalTarget
from dspark.target.weights import load_target

TOPK = 6


def test_every_prompt_runs_in_memory_of_its_own(tiny_directory, monkeypatch):
    config = ModelConfig.from_hf(presets.tiny())
    weights = load_target(tiny_directory, config)
    lengths = []
    forward = LocalTarget.forward

    def counted(self, rows, **kwargs):
        lengths.append(len(rows[0].tokens))
        out = forward(self, rows, **kwargs)
        assert out.hidden.isfinite().all()
        return out

    monkeypatch.setattr(LocalTarget, "forward", counted)
    warm_up.compile_prompt_kernels(weights, config, torch.device("cpu"))
    assert tuple(lengths) == warm_up.ROW_COUNTS


def test_the_lengths_reach_every_tile_height_twice():
    """Linears: up to 16 rows, up to DECODE_ROWS, more. Experts of six a row: few, many, sorted."""

    def classes(bounds: tuple[int, ...]) -> set[tuple[int, bool]]:
        return {
            (sum(rows > bound for bound in bounds), rows % 16 == 0) for rows in warm_up.ROW_COUNTS
        }

    both = (False, True)
    assert classes((16, DECODE_ROWS)) == {(i, whole) for i in range(3) for whole in both}
    experts = classes((FEW_PAIRS // TOPK, MANY_PAIRS // TOPK))
    # Up to 64 pairs are at most 10 rows, none of them a multiple of 16.
    assert experts == {(0, False)} | {(i, whole) for i in (1, 2) for whole in both}
