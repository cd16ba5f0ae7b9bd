"""Warnings of the start log that are untrue for DeepSeek-V4, left out.

The cache brings scales of its own, one for each group of values, so that SGLang's missing scaling
factors are of no account. The model's YaRN goes by the factor and the original length that
config.json gives, so that a shorter `max_position_embeddings` contradicts neither. Conversations
are written by SGLang's own code for this model, which needs no template. Token ids of yes and no
are another model's, for an endpoint that reranks.
"""

import logging
from collections.abc import Callable

UNTRUE = (  # logger, start of the message
    (
        "sglang.srt.model_executor.model_runner_components.load_model_utils",
        "Using FP8 KV cache but no scaling factors provided.",
    ),
    ("transformers.modeling_rope_utils", "The explicitly set RoPE scaling factor"),
    ("sglang.srt.parser.template_manager", "No HuggingFace chat template found"),
    ("sglang.srt.parser.template_manager", "No chat template found"),
    ("sglang.srt.entrypoints.openai.serving_rerank", "Using fallback token IDs for yes/no"),
)


class Leave(logging.Filter):
    """Drops records that start with `start`, where `is_ours` says that the model is DeepSeek-V4."""

    def __init__(self, start: str, is_ours: Callable[[], bool]):
        super().__init__()
        self.start, self.is_ours = start, is_ours

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.getMessage().startswith(self.start) and self.is_ours())


def leave_out_what_is_untrue(is_ours: Callable[[], bool]) -> None:
    for name, start in UNTRUE:
        logging.getLogger(name).addFilter(Leave(start, is_ours))
