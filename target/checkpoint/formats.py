"""Number formats of the official checkpoint: FP8 in 128x128 blocks and MXFP4 in groups of 32.

Both scale by E8M0, a bare power-of-two exponent: byte b means 2^(b - 127), 255 is NaN. Decoding
lives with the kernels (`dequantise_fp8`, `dequantise_mxfp4`); this is its inverse, shared by the
test-checkpoint writer and the training exporter.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

E8M0_BIAS = 127
E8M0_NAN = 255
FP8_BLOCK = 128
FP8_MAX = 448.0  # largest e4m3 magnitude
MXFP4_GROUP = 32
E2M1_MAX = 6.0
# Midpoints between neighbouring E2M1 magnitudes; a tie goes to the code with an even mantissa bit.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


class Fp8Blocks(NamedTuple):
    codes: torch.Tensor  # float8_e4m3fn [N, K]
    scales: torch.Tensor  # uint8 E8M0 [ceil(N/128), ceil(K/128)]


class Mxfp4Groups(NamedTuple):
    packed: torch.Tensor  # uint8 [..., K/2], low nibble = even column
    scales: torch.Tensor  # uint8 E8M0 [..., K/32]


def encode_fp8(weight: torch.Tensor) -> Fp8Blocks:
    """Quantise a matrix, f32 or bf16 [N, K], with the smallest power-of-two scale that fits.

    Raises:
        ValueError: not a matrix, or not finite.
    """
    if weight.ndim != 2:
        raise ValueError(f"FP8 blocks need a matrix, got shape {list(weight.shape)}.")
    _check_finite(weight)
    rows, columns = weight.shape
    padded = F.pad(weight.double(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    exponent = _scale_exponent(blocks.abs().amax((1, 3)), FP8_MAX)  # [row blocks, column blocks]
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None])
    values = scaled.flatten(2).flatten(0, 1)[:rows, :columns]
    # A power-of-two scale keeps an f32 value exact, so the only rounding is the one to e4m3.
    codes = values.float().to(torch.float8_e4m3fn)
    return Fp8Blocks(codes.contiguous(), (exponent + E8M0_BIAS).to(torch.uint8))


def encode_mxfp4(weight: torch.Tensor) -> Mxfp4Groups:
    """Quantise f32 or bf16 [..., K], K a multiple of 32, to the nearest E2M1 (ties to even).

    Each group of 32 columns takes the smallest power-of-two scale under which nothing saturates.

    Raises:
        ValueError: K is no multiple of 32, or a value is not finite.
    """
    if weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"MXFP4 needs a multiple of 32 columns, got {weight.shape[-1]}.")
    _check_finite(weight)
    groups = weight.double().unflatten(-1, (-1, MXFP4_GROUP))
    exponent = _scale_exponent(groups.abs().amax(-1), E2M1_MAX)
    codes = encode_e2m1(torch.ldexp(groups, -exponent[..., None])).flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Mxfp4Groups(packed, (exponent + E8M0_BIAS).to(torch.uint8))


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Any float tensor to uint8 codes 0..15 (bit 3 = sign, also of -0); saturates at 6."""
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint in _TIES_DOWN:
        code += magnitude > midpoint
    for midpoint in _TIES_UP:
        code += magnitude >= midpoint
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _scale_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """i32 e with amax <= largest * 2^e, as small as possible; 0 for a block of zeros.

    Byte 0 is never used: 2^-127 is subnormal in f32, and arithmetic may flush it to zero.
    """
    mantissa, exponent = torch.frexp(amax / largest)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(amax == 0, 0, exponent)
    return exponent.clamp(1 - E8M0_BIAS, E8M0_NAN - 1 - E8M0_BIAS).to(torch.int32)


def _check_finite(weight: torch.Tensor) -> None:
    if not torch.isfinite(weight).all():
        raise ValueError("Only finite weights can be quantised.")
