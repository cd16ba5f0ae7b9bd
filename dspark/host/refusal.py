"""The answer to a call that cannot be served."""

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException


class NotServed(HTTPException):
    """Status 400 with one sentence over HTTP; the Engine raises it as it is."""

    def __init__(self, sentence: str):
        super().__init__(HTTPStatus.BAD_REQUEST, detail=sentence)

    def __str__(self) -> str:
        return self.detail


async def with_its_sentence(answer: Awaitable[Any]) -> Any:
    """SGLang's own refusal (a RuntimeError) as ours; over HTTP it is a 500 without a word."""
    try:
        return await answer
    except RuntimeError as error:
        raise NotServed(str(error)) from None
