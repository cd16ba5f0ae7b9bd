"""Command line of the recipe: `corpus`, `target`, `draft`, `evaluate`, `all`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from dspark.bench.train_embedded import config as presets
from dspark.bench.train_embedded import train_draft, train_target
from dspark.bench.train_embedded.data import Corpus, load_corpus
from dspark.bench.train_embedded.evaluate import calibrate, completions, evaluate
from dspark.bench.train_embedded.session import Budget, pick_device
from dspark.bench.train_embedded.store import Log, load_masters, save_blocks, save_masters
from dspark.speculation import calibration
from dspark.target.config import ModelConfig

TINY_STEPS = 3


class Run:
    """One invocation: what the phases share."""

    def __init__(self, arguments: argparse.Namespace):
        self.tiny, self.seed, self.compile = arguments.tiny, arguments.seed, arguments.compile
        self.config = ModelConfig.from_hf(presets.tiny() if self.tiny else presets.embedded())
        self.device, self.numerics = pick_device()
        self.out = arguments.out
        self.work = arguments.work or arguments.out / "work"
        if not arguments.resume:
            for file in self.work.glob("*.pt"):
                if file.stem in arguments.phases:
                    file.unlink()
        self.data = arguments.data
        self.log = Log(self.out / "log.jsonl")
        self.steps = TINY_STEPS if self.tiny else arguments.steps
        self.minutes = {"target": arguments.target_minutes, "draft": arguments.draft_minutes}
        self.masters_from = arguments.masters

    def corpus(self) -> Corpus:
        return load_corpus(self.data, self.device)

    def masters(self, stem: str) -> dict[str, torch.Tensor]:
        """From this run's output, else from `--masters`."""
        here = list(self.out.glob(f"{stem}-*.safetensors"))
        return load_masters(self.out if here else self.masters_from, stem, self.device)

    def target(self) -> None:
        sizes = (
            train_target.Sizes(batch=2, length=256, held_out=2)
            if self.tiny
            else train_target.Sizes(batch=16, length=2048, held_out=32)
        )
        masters = train_target.train_target(
            self.corpus(), self.config, sizes, Budget(self.minutes["target"], self.steps),
            self.numerics, self.device, seed=self.seed, state_file=self.work / "target.pt",
            log=self.log, compile_blocks=self.compile,
        )  # fmt: skip
        save_masters(self.out, "target", masters)
        texts = completions(
            masters, self.data / "tokenizer.json", self.config, self.numerics, self.device,
            length=32 if self.tiny else 160,
        )  # fmt: skip
        (self.out / "completions.json").write_text(json.dumps(texts, indent=1) + "\n")
        print(*texts.values(), sep="\n" + "-" * 40 + "\n", flush=True)

    def draft(self) -> None:
        sizes = (
            train_draft.Sizes(
                sequences=4, length=128, prompt=64, generate_batch=2, batch=2, anchors=4
            )
            if self.tiny
            else train_draft.Sizes(
                sequences=16384, length=768, prompt=128, generate_batch=4096, batch=32, anchors=128
            )
        )
        masters = train_draft.train_draft(
            self.masters("target"), self.corpus(), self.config, sizes,
            Budget(self.minutes["draft"], self.steps), self.numerics, self.device,
            seed=self.seed, state_file=self.work / "draft.pt", log=self.log,
            compile_blocks=self.compile,
        )  # fmt: skip
        save_masters(self.out, "draft", masters)

    def evaluate(self) -> None:
        report, measured = evaluate(
            self.masters("target"), self.masters("draft"), self.corpus(), self.config,
            self.numerics, self.device, sequences=2 if self.tiny else 256,
            length=128 if self.tiny else 640, prompt=64 if self.tiny else 128,
        )  # fmt: skip
        text = json.dumps(report, indent=1)
        (self.out / "acceptance.json").write_text(text + "\n")
        save_blocks(self.out / "blocks.safetensors", measured)
        calibration.save(calibrate(measured), self.out / "confidence.json")
        print(text, flush=True)

    def corpus_phase(self) -> None:
        # Only this phase needs the source packages, so only it imports the builder.
        from dspark.bench.train_embedded.corpus import build

        manifest = build(self.data, self.config.vocab_size, 6 if self.tiny else None)
        print(json.dumps(manifest, indent=1), flush=True)


PHASES = {
    "corpus": Run.corpus_phase,
    "target": Run.target,
    "draft": Run.draft,
    "evaluate": Run.evaluate,
}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if "all" in arguments.phases:
        arguments.phases = list(PHASES)
    arguments.out = arguments.out or Path(tempfile.mkdtemp(prefix="dspark-train-"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments)
    print(f"{run.device}, output in {arguments.out}", flush=True)
    for phase in arguments.phases:
        PHASES[phase](run)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dspark.bench.train_embedded",
        description="Train the embedded checkpoint. Phases run in the order given.",
    )
    parser.add_argument("phases", nargs="+", choices=[*PHASES, "all"])
    parser.add_argument("--data", type=Path, default=Path(".train"), help="corpus folder")
    parser.add_argument("--out", type=Path, help="masters, logs and reports (default: temporary)")
    parser.add_argument("--work", type=Path, help="checkpoints for --resume (default: OUT/work)")
    parser.add_argument("--masters", type=Path, default=Path(".train"),
                        help="where target-*.safetensors are, if not in --out")  # fmt: skip
    parser.add_argument("--target-minutes", type=float, default=7.0)
    parser.add_argument("--draft-minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, help="fixed number of steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a toy, for tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
