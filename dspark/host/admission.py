"""The longest prompt that can be admitted: longer ones would wait for ever, and all behind them.

SGLang takes a request that leaves no room for its first new token, and then never finds a moment
to start it. The bounds below are those of its admission.
"""

from typing import NamedTuple

from dspark.host.pools import PAGE_TOKENS

FOR_OUTPUT = 7  # positions of the context that SGLang keeps free behind a prompt


class Room(NamedTuple):
    """What an idle worker has for one request."""

    total: int  # tokens of the full pool
    window: int  # tokens of the window pool, which a prompt that is not cut passes whole
    context: int  # tokens of prompt and output together
    chunked: bool  # whether prompts are cut into chunks


class Limit(NamedTuple):
    tokens: int  # of the longest prompt
    reason: str  # what bounds it, and which flag gives more


def longest_prompt(room: Room) -> Limit:
    """The longest prompt that can be started with one new token."""
    context, total = room.context, room.total
    limits = [
        Limit(
            context - FOR_OUTPUT,
            f"the context has {context} tokens, the last of them for the output; "
            "--context-length sets it",
        ),
        Limit(
            whole_pages(total - 2),  # admission wants more room than the request takes, and a token
            f"the pool holds {total} tokens and a page of {PAGE_TOKENS} stays in reserve; "
            "--max-total-tokens gives more",
        ),
    ]
    if not room.chunked:
        limits.append(
            Limit(
                whole_pages(room.window - 1),
                f"the window pool holds {room.window} tokens and a prompt passes it whole; "
                "--chunked-prefill-size cuts prompts",
            )
        )
    return min(limits, key=lambda limit: limit.tokens)


_room: Room | None = None  # of this process's worker; SGLang's check below knows no worker


def limit_prompts(worker_info: tuple, room: Room) -> tuple:
    """SGLang's description of a worker, whose sixth entry is the shortest prompt to refuse."""
    global _room
    _room = room
    return (*worker_info[:5], longest_prompt(room).tokens + 1, *worker_info[6:])


def check_length(original, request, shortest_refused: int, truncates: bool) -> str | None:
    """SGLang's validate_input_length: one sentence that is true, and cut prompts that can start."""
    if _room is None:
        return original(request, shortest_refused, truncates)
    if truncates:  # it would cut to the shortest prompt that can not
        return original(request, shortest_refused - 1, truncates)
    return find_length_fault(len(request.origin_input_ids), _room)


def whole_pages(tokens: int) -> int:
    """Tokens of the pages that fit, without the one kept in reserve."""
    return max(tokens - PAGE_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS


def find_length_fault(tokens: int, room: Room) -> str | None:
    """One sentence if a prompt of so many tokens can never be started."""
    longest, reason = longest_prompt(room)
    if tokens <= longest:
        return None
    return f"The prompt has {tokens} tokens, and at most {longest} can be started: {reason}."
