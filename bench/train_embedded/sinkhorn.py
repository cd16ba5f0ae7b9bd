"""Sinkhorn normalisation of the 4x4 mixing matrices, with a backward pass that stores only sums.

Unrolled autograd would run some 300 tiny kernels per site. Every half-iteration divides by row or
column sums, so its input is its output times those sums: the backward pass walks back from the
result. CUDA tensors run one Triton kernel each way, CPU tensors the same steps in PyTorch.
"""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - a CPU-only PyTorch works without it
    triton = None

BLOCK = 64  # matrices per program


@torch.library.custom_op("dspark_train::sinkhorn", mutates_args=())
def _forward(
    logits: torch.Tensor, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count = logits.shape[0]
    result = torch.empty_like(logits)
    sums = logits.new_empty(count, 2 * iterations - 1, 4)
    if logits.is_cuda or _interpreted():
        grid = (triton.cdiv(count, BLOCK),)
        _forward_kernel[grid](logits, result, sums, count, iterations, eps, BLOCK)
        return result, sums
    matrix = torch.softmax(logits, -1) + eps
    for step, axis in enumerate(_axes(iterations)):
        total = matrix.sum(axis, keepdim=True) + eps
        matrix = matrix / total
        sums[:, step] = total.flatten(1)
    result.copy_(matrix)
    return result, sums


@_forward.register_fake
def _(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(logits), logits.new_empty(logits.shape[0], 2 * iterations - 1, 4)


@torch.library.custom_op("dspark_train::sinkhorn_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, result: torch.Tensor, sums: torch.Tensor, eps: float
) -> torch.Tensor:
    count, steps = sums.shape[:2]
    grad = grad.contiguous()
    if grad.is_cuda or _interpreted():
        out = torch.empty_like(grad)
        grid = (triton.cdiv(count, BLOCK),)
        _backward_kernel[grid](grad, result, sums, out, count, steps, eps, BLOCK)
        return out
    matrix = result
    for step in reversed(range(steps)):
        axis = 1 if step % 2 == 0 else 2
        total = sums[:, step].unsqueeze(axis)
        grad = (grad - (grad * matrix).sum(axis, keepdim=True)) / total
        matrix = matrix * total
    softmax = matrix - eps
    return softmax * (grad - (grad * softmax).sum(2, keepdim=True))


@_backward.register_fake
def _(grad: torch.Tensor, result: torch.Tensor, sums: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output)
    ctx.eps = inputs[2]


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple:
    result, sums = ctx.saved_tensors
    return _backward(grad, result, sums, ctx.eps), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """f32 [T, 4, 4] logits to nearly doubly stochastic matrices, as hyper-connections use them.

    Row softmax + eps, one column step, then `iterations` - 1 times a row and a column step.
    """
    return _forward(logits.contiguous(), iterations, eps)[0]


def _axes(iterations: int) -> list[int]:
    return [1] + [2, 1] * (iterations - 1)


def _interpreted() -> bool:
    return triton is not None and triton.knobs.runtime.interpret


if triton is not None:

    @triton.jit
    def _offsets(count, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        cells = index[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        lines = index[:, None] * 4 + four[None, :]
        valid = index < count
        return index, cells, lines, valid

    @triton.jit
    def _forward_kernel(logits, result, sums, count, iterations, eps, BLOCK: tl.constexpr):
        index, cells, _, valid = _offsets(count, BLOCK)
        a = tl.load(logits + cells, mask=valid[:, None, None], other=0.0)
        a = tl.exp(a - tl.max(a, axis=2)[:, :, None])
        a = a / tl.sum(a, axis=2)[:, :, None] + eps
        four = tl.arange(0, 4)
        base = index[:, None] * (2 * iterations - 1) * 4 + four[None, :]
        s = tl.sum(a, axis=1) + eps
        a = a / s[:, None, :]
        tl.store(sums + base, s, mask=valid[:, None])
        for i in range(1, iterations):
            s = tl.sum(a, axis=2) + eps
            a = a / s[:, :, None]
            tl.store(sums + base + (2 * i - 1) * 4, s, mask=valid[:, None])
            s = tl.sum(a, axis=1) + eps
            a = a / s[:, None, :]
            tl.store(sums + base + 2 * i * 4, s, mask=valid[:, None])
        tl.store(result + cells, a, mask=valid[:, None, None])

    @triton.jit
    def _backward_kernel(grad, result, sums, out, count, steps, eps, BLOCK: tl.constexpr):
        index, cells, _, valid = _offsets(count, BLOCK)
        mask = valid[:, None, None]
        a = tl.load(result + cells, mask=mask, other=0.0)
        g = tl.load(grad + cells, mask=mask, other=0.0)
        four = tl.arange(0, 4)
        base = index[:, None] * steps * 4 + four[None, :]
        for back in range(steps // 2):
            step = steps - 1 - 2 * back
            s = tl.load(sums + base + step * 4, mask=valid[:, None], other=1.0)
            g = (g - tl.sum(g * a, axis=1)[:, None, :]) / s[:, None, :]
            a = a * s[:, None, :]
            s = tl.load(sums + base + (step - 1) * 4, mask=valid[:, None], other=1.0)
            g = (g - tl.sum(g * a, axis=2)[:, :, None]) / s[:, :, None]
            a = a * s[:, :, None]
        s = tl.load(sums + base, mask=valid[:, None], other=1.0)
        g = (g - tl.sum(g * a, axis=1)[:, None, :]) / s[:, None, :]
        a = a * s[:, None, :] - eps
        g = a * (g - tl.sum(g * a, axis=2)[:, :, None])
        tl.store(out + cells, g, mask=mask)
