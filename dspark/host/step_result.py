"""What a decode step hands to the scheduler, and what it had been asked to do."""

from dataclasses import dataclass

from sglang.srt.managers.utils import GenerationBatchResult

from dspark.speculation.turn import DRAFT, Turn


@dataclass
class StepResult(GenerationBatchResult):
    turn: Turn = DRAFT
