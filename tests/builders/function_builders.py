"""`autograd.Function`s whose kernels write by address, unseen by torch, and blocks that call them."""

import ctypes

import numpy as np
import torch

_WORDS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.float16}


def memory_of(tensor):
    """Return the elements of a dense tensor as an array at its address, unseen by the dispatcher and version
    counters."""
    word = np.dtype(_WORDS[tensor.dtype])
    content = (ctypes.c_char * (tensor.numel() * word.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(content, word).reshape(tuple(tensor.shape))


def read_unseen(tensor):
    """Return the numbers in a tensor, read at its address."""
    words = memory_of(tensor)
    if tensor.dtype is torch.bfloat16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float64 if tensor.dtype is torch.float64 else np.float32)


def write_unseen(tensor, values):
    """Write numbers into a tensor, at its address."""
    words = np.ascontiguousarray(values)
    if tensor.dtype is torch.bfloat16:
        words = (words.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    memory_of(tensor)[...] = words


class Scale(torch.autograd.Function):
    """x * factor, written by address."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        out = torch.empty_like(x)
        write_unseen(out, read_unseen(x) * factor)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class ScaleInPlace(Scale):
    """x * factor, written into x unseen by autograd, like Liger's and Unsloth's rotations."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        write_unseen(x, read_unseen(x) * factor)
        ctx.factor = factor
        return x.view(x.shape)


class Square(torch.autograd.Function):
    """x * x, by torch's operators."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def through(function, *args):
    """Return a block whose hidden states pass through the Function and are saved after it."""

    def forward(block, hidden):
        return hidden + block.down(function(block.up(hidden), *args).tanh())

    return forward


def tanh_of(profile):
    """Return the value of the first kind that a tanh made."""
    return next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))


def names_of(profile):
    """Return the names of the first kind's operators."""
    return [operator.name for operator in profile.kinds[0].operators]


def in_a_closure(function):
    """Return a Function like `function`, whose factors are in a tensor of a closure."""
    table = torch.full((8,), 3.0)

    class Closure(function):
        @staticmethod
        def forward(ctx, x, factor=3.0):
            out = torch.empty_like(x)
            write_unseen(out, read_unseen(x) * read_unseen(table))
            ctx.factor = factor
            return out

    return Closure
