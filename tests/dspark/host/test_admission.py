"""The longest prompt is what SGLang's own admission would start on an idle server."""

import pytest

from dspark.host.admission import limit_prompts, longest_prompt

PAGE = 256


def is_started(prompt: int, total: int, window: int, chunked: bool) -> bool:
    """SGLang's conditions for one new token, with all pages free."""
    pages = -(-prompt // PAGE)
    new = min(1, total - pages * PAGE - PAGE - 1)  # what it cuts the number of new tokens to
    fits_window = chunked or pages * PAGE + PAGE < window
    return new == 1 and prompt + new + PAGE < total and fits_window


@pytest.mark.parametrize("total", range(2 * PAGE, 12 * PAGE + 1, PAGE))
@pytest.mark.parametrize("window", [4 * PAGE, 5 * PAGE, 12 * PAGE])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_bound_is_where_admission_ends(total, window, chunked):
    longest = longest_prompt(total, window, chunked)
    assert longest == max(
        (n for n in range(1, total + 1) if is_started(n, total, window, chunked)), default=0
    )


def test_a_bound_of_the_context_stays_where_it_is_lower():
    info = (4096, "b", "c", "d", 900, 895, "rest")
    assert limit_prompts(info, 4096, True) == info
    assert limit_prompts((1024, "b", "c", "d", 1023, 1018, "rest"), 1024, True)[5] == 513
