"""Files of a session: `session.json`, `pairs.jsonl` (every raw sample), `winner.json` if won."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.bench.tune.timing import Sample

SCHEMA = 1
Samples = dict[str, dict[str, list[Sample]]]  # candidate -> case -> samples


class OutputError(RuntimeError):
    """The output folder cannot be used; one sentence."""


def open_folder(folder: Path, resume: bool) -> None:
    """Create the folder; OutputError if it holds anything and this is not a continuation."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not resume:
        raise OutputError(
            f"{folder} is not empty; choose another folder or continue with --resume."
        )


def check_same_session(folder: Path, session: Mapping[str, Any]) -> None:
    """OutputError when a session to continue was begun with other arguments or another source."""
    file = folder / "session.json"
    if not file.exists():
        return
    begun = json.loads(file.read_text())
    for field in ("op", "seed", "args", "source", "incumbent"):
        if field == "source":
            same = begun["source"]["files"] == session["source"]["files"]
        elif field == "incumbent":
            same = begun[field]["config"] == session[field]["config"]
        else:
            same = begun[field] == session[field]
        if not same:
            raise OutputError(f"{folder} was begun with another {field}; start a new folder.")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Complete or not at all: a reader never sees half a file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, file)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def append_samples(file: Path, candidate: str, case: str, samples: Sequence[Sample]) -> None:
    with file.open("a") as stream:
        for sample in samples:
            line = {"cand": candidate, "case": case, **sample._asdict()}
            stream.write(json.dumps(line) + "\n")


def keep_complete(file: Path, pairs: int) -> Samples:
    """Drop cases that were cut short, from the file as well; returns the others."""
    complete = {
        candidate: {case: s for case, s in cases.items() if len(s) == pairs}
        for candidate, cases in read_samples(file).items()
    }
    file.write_text("")
    for candidate, cases in complete.items():
        for case, samples in cases.items():
            append_samples(file, candidate, case, samples)
    return complete


def read_samples(file: Path) -> Samples:
    """Everything measured so far; a last line cut short by a crash is ignored."""
    samples: Samples = {}
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            candidate, case = record.pop("cand"), record.pop("case")
            samples.setdefault(candidate, {}).setdefault(case, []).append(Sample(**record))
    return samples
