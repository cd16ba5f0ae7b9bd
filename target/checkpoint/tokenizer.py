"""A tokenizer for the test checkpoints, so that text requests and chat clients work on them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS, EOS = "<|bos|>", "<|eos|>"  # ids 0 and 1
BYTES = 256


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per byte (ids 2..257); ids above print as `<id>` and never come out of text.

    Raises:
        ValueError: fewer ids than bytes and the two special tokens.
    """
    if vocab_size < BYTES + 2:
        raise ValueError(f"A byte tokenizer needs {BYTES + 2} ids, got {vocab_size}.")
    characters = bytes_to_unicode()
    vocab = {BOS: 0, EOS: 1} | {characters[byte]: byte + 2 for byte in range(BYTES)}
    vocab |= {f"<{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    byte_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": 0, "eos_token_id": 1}
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
