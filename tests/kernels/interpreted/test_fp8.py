"""e4m3 conversion of the kernels: one rounding to nearest even, NaN kept."""

from kv_cases import assert_rounds_once, fp8_borders


def test_borders_between_codes_round_once():
    assert_rounds_once(fp8_borders())
