"""FP8 and MXFP4 encoding against nearest-value search, hand-made vectors and exact round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.kernels.common.fp8 import decode_e8m0
from dspark.kernels.linear import dequantise_fp8
from dspark.kernels.moe import dequantise_mxfp4
from dspark.target.checkpoint.formats import encode_e2m1, encode_fp8, encode_mxfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRID = torch.cat((E2M1, -E2M1))  # value of each code; code 8 is -0


def decode_fp8(encoded):
    return dequantise_fp8(encoded.codes, decode_e8m0(encoded.scales))


def test_every_e2m1_code_is_the_code_of_its_value():
    assert encode_e2m1(GRID).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (7.0, 7), (1e9, 7)],
)
def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate(value, code):
    assert encode_e2m1(torch.tensor([value, -value])).tolist() == [code, code + 8]


@settings(deadline=None)
@given(st.floats(-6, 6, width=32))
def test_e2m1_is_the_nearest_value(value):
    code = int(encode_e2m1(torch.tensor([value])))
    distance = (GRID.double() - value).abs()
    assert distance[code] == distance.min()


def test_low_nibble_is_the_even_column():
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1], row[0, 31] = 6.0, -0.5, 1.0
    encoded = encode_mxfp4(row)
    assert encoded.scales.tolist() == [[127]]
    assert encoded.packed[0, 0] == 0x7 | 0x9 << 4
    assert encoded.packed[0, 15] == 0x2 << 4


@pytest.mark.parametrize(
    ("largest", "byte"),
    [(6.0, 127), (6.0001, 128), (3.0, 126), (3.01, 127), (0.0, 127), (96.0, 131)],
)
def test_mxfp4_takes_the_smallest_scale_that_does_not_saturate(largest, byte):
    assert encode_mxfp4(torch.full((1, 32), -largest)).scales.tolist() == [[byte]]


@pytest.mark.parametrize(
    ("largest", "byte"), [(448.0, 127), (449.0, 128), (224.0, 126), (0.0, 127), (2.0**-118, 1)]
)
def test_fp8_takes_the_smallest_scale_that_does_not_saturate(largest, byte):
    encoded = encode_fp8(torch.full((1, 1), largest))
    assert encoded.scales.tolist() == [[byte]]


def test_representable_matrices_survive_exactly():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (6, 96), generator=generator)
    codes[:, ::32] = 7  # a 6 in every group pins its scale
    exponents = torch.randint(-20, 20, (6, 3), generator=generator)
    matrix = torch.ldexp(GRID[codes], exponents.repeat_interleave(32, 1))
    encoded = encode_mxfp4(matrix)
    assert dequantise_mxfp4(encoded.packed, encoded.scales).equal(matrix.double())

    fp8 = (torch.randn(200, 300, generator=generator) * 60).to(torch.float8_e4m3fn).float()
    fp8[::128, ::128] = 448.0
    encoded = encode_fp8(fp8 / 1024)
    assert encoded.scales.shape == (2, 3)
    assert decode_fp8(encoded).equal(fp8.double() / 1024)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 140), st.integers(1, 140), st.integers(-60, 60), st.integers(0, 2**31))
def test_fp8_is_the_nearest_value_of_the_chosen_scale(rows, columns, exponent, seed):
    """Odd shapes end in partial blocks; every element rounds within half a unit of its code."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    matrix = torch.ldexp(matrix, torch.tensor(exponent))
    encoded = encode_fp8(matrix)
    by_row = decode_e8m0(encoded.scales).double().repeat_interleave(128, 0)[:rows]
    scale = by_row.repeat_interleave(128, 1)[:, :columns]
    scaled = matrix.double() / scale
    assert scaled.abs().max() <= 448
    unit = torch.ldexp(torch.ones(()).double(), scaled.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((decode_fp8(encoded) / scale - scaled).abs() <= unit / 2).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(-60, 60), st.integers(0, 2**31))
def test_encoding_a_decoded_matrix_changes_nothing(rows, groups, exponent, seed):
    matrix = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed))
    matrix = torch.ldexp(matrix, torch.tensor(exponent))
    for encode, decode in (
        (encode_mxfp4, lambda e: dequantise_mxfp4(e.packed, e.scales)),
        (encode_fp8, decode_fp8),
    ):
        once = decode(encode(matrix))
        assert decode(encode(once.float())).equal(once)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: encode_mxfp4(torch.ones(2, 33)), "multiple of 32 columns, got 33"),
        (lambda: encode_mxfp4(torch.full((1, 32), torch.inf)), "Only finite weights"),
        (lambda: encode_fp8(torch.ones(3)), "need a matrix"),
        (lambda: encode_fp8(torch.full((2, 2), torch.nan)), "Only finite weights"),
    ],
)
def test_unencodable_input_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
