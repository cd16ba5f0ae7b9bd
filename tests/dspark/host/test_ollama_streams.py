"""Ollama's streams say all of the text, however many tokens the last step gives."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from dspark.host import http_hooks

CUTS = [["a", "ab", "abcdef"], ["abcdef"], ["abc", "abcdef", "abcdef"]]


@pytest.mark.parametrize("texts", CUTS)
@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_the_last_text_is_sent(monkeypatch, kind, texts):
    """Failed before: the text of the last event was lost, several tokens with DSpark."""
    monkeypatch.setattr(http_hooks, "served_model", lambda manager: "ours")

    async def generate_request(request, raw_request):
        for i, text in enumerate(texts, start=1):
            end = {"type": "length"} if i == len(texts) else None
            yield {"text": text, "meta_info": {"finish_reason": end}}

    async def events() -> list[dict]:
        original = getattr(OllamaServing, f"_stream_{kind}_response")
        serving = OllamaServing(SimpleNamespace(generate_request=generate_request))
        response = await http_hooks.stream_ollama(original, serving, None, None, "m")
        return [json.loads(event) async for event in response.body_iterator]

    said = asyncio.run(events())
    pieces = [e["message"]["content"] if kind == "chat" else e["response"] for e in said]
    assert "".join(pieces) == texts[-1]
    assert [event["done"] for event in said] == [False] * len(texts) + [True]
