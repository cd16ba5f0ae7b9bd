"""A checkpoint taken apart: the target in one directory, its draft in another."""

import json
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from dspark.target.checkpoint.names import DRAFT_PREFIX
from dspark.target.checkpoint.reader import INDEX, Checkpoint


class Apart(NamedTuple):
    target: Path  # its config.json says nothing of a draft
    draft: Path


def separate(source: Path, into: Path) -> Apart:
    apart = Apart(into / "target", into / "draft")
    config = json.loads((source / "config.json").read_text())
    plain = {name: value for name, value in config.items() if not name.startswith("dspark_")}
    for directory, fields, wanted in (
        (apart.target, plain, lambda name: not name.startswith(DRAFT_PREFIX)),
        (apart.draft, config, lambda name: name.startswith(DRAFT_PREFIX)),
    ):
        tensors = dict(Checkpoint(source).tensors(wanted))
        directory.mkdir()
        save_file(tensors, directory / "model-00001.safetensors")
        weight_map = dict.fromkeys(tensors, "model-00001.safetensors")
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (directory / "config.json").write_text(json.dumps(fields))
    return apart
