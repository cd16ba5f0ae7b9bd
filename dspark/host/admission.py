"""The longest prompt that can be admitted: longer ones would wait for ever, and all behind them.

SGLang takes a request that leaves no room for its first new token, and then never finds a moment
to start it. The bounds below are those of its admission.
"""

from dspark.host.pools import PAGE_TOKENS


def longest_prompt(total: int, window: int, chunked: bool) -> int:
    """Tokens of the longest prompt that can be started with one new token, on an idle server.

    Args:
        total: tokens of the full pool.
        window: tokens of the window pool, which a prompt that is not cut into chunks passes whole.
        chunked: whether prompts are cut into chunks.
    """
    room = total - 2  # admission wants more room than the request takes, and one new token
    if not chunked:
        room = min(room, window - 1)
    return max(room - PAGE_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS  # a page is kept in reserve


def limit_prompts(worker_info: tuple, window: int, chunked: bool) -> tuple:
    """SGLang's description of a worker, whose sixth entry is the shortest prompt to refuse."""
    shortest = longest_prompt(worker_info[0], window, chunked) + 1
    return (*worker_info[:5], min(worker_info[5], shortest), *worker_info[6:])
