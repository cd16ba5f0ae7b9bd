"""Requests that SGLang would pass on to a worker, where they would end the server."""

from collections.abc import Sequence


def check_request(request, input_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Refuse one tokenized request; SGLang answers the ValueError with status 400.

    Args:
        request: SGLang's GenerateReqInput or EmbeddingReqInput.
        input_ids: its prompt, None when it brings embeddings instead.
        vocab_size: of the model.

    Raises:
        ValueError: a token outside the vocabulary, or an input that is not tokens.
    """
    if getattr(request, "input_embeds", None) is not None:
        raise ValueError("This server takes token ids or text, not input_embeds.")
    if request.contains_mm_input():
        raise ValueError("This server takes token ids or text, not images, video or audio.")
    for token in input_ids or ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"Token id {token} is outside the vocabulary of {vocab_size} tokens.")
