"""Token streams on the training device and random windows of them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

# Share of the training windows from each part of the corpus.
MIXTURE = {"stdlib": 0.45, "packages": 0.45, "prose": 0.10}
HELD_OUT = ("heldout_code", "heldout_prose")
AT_DOCUMENT_START = 0.25  # share of windows that begin a document, as a prompt does
BOS = 0


class Corpus(NamedTuple):
    streams: dict[str, torch.Tensor]  # i32 [n] each: documents, every one between BOS and EOS
    starts: dict[str, torch.Tensor]  # i64 positions of BOS
    manifest: dict


def load_corpus(directory: Path, device: torch.device) -> Corpus:
    """Read what `corpus.build` wrote."""
    manifest = json.loads((directory / "manifest.json").read_text())
    with np.load(directory / "tokens.npz") as file:
        streams = {n: torch.from_numpy(file[n].astype(np.int32)).to(device) for n in file.files}
    starts = {n: (s == BOS).nonzero()[:, 0] for n, s in streams.items()}
    return Corpus(streams, starts, manifest)


def training_windows(
    corpus: Corpus, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """i64 [count, length] in the proportions of `MIXTURE`."""
    parts, left = [], count
    for number, (name, share) in enumerate(MIXTURE.items()):
        take = left if number == len(MIXTURE) - 1 else round(count * share)
        parts.append(windows(corpus, name, take, length, generator))
        left -= take
    return torch.cat(parts)


def windows(
    corpus: Corpus, name: str, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """i64 [count, length] at random positions of one stream."""
    stream, starts = corpus.streams[name], corpus.starts[name]
    device = stream.device
    limit = len(stream) - length
    first = torch.randint(limit + 1, (count,), generator=generator, device=device)
    aligned = starts[torch.randint(len(starts), (count,), generator=generator, device=device)]
    at_start = torch.rand(count, generator=generator, device=device) < AT_DOCUMENT_START
    first = torch.where(at_start & (aligned <= limit), aligned, first)
    return stream[first[:, None] + torch.arange(length, device=device)].long()
