"""Our chunked cross entropy beside torch's own `F.linear_cross_entropy` (torch 2.13) and whole logits.

    python -m adacc_hf.eval.chunked_head

Time of forward and backward as a part of whole logits' in the same round, what is live at most beside what is given,
and the relative L2 error of the gradients from those of float64. One thread, CPU time, the median of the rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.records import Spread, markdown_table, positive_int
from adacc_hf.eval.trials.clock import cpu_seconds
from adacc_hf.head.chunked_loss import chunk_rows, chunked_cross_entropy
from adacc_hf.torch_glue.memory import MemoryMeter, backward

OURS = "as large as ours"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean loss of whole logits, as Transformers computes it: products as they are, the rest in float32."""
    return F.cross_entropy(F.linear(rows, weight).float(), target)


def ours(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same by chunks."""
    return chunked_cross_entropy(rows, weight, None, target, dtype=rows.dtype)


def torchs(chunking: str) -> Loss:
    """The same by torch, its batches of rows as large as ours or as it chooses."""

    def loss(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        if chunking == OURS:
            options = torch.nn.LinearCrossEntropyOptions(
                batch_chunk_size=chunk_rows(rows.shape[-1]), chunking_method=None
            )
        return F.linear_cross_entropy(rows, weight, target, options=options)

    return loss


def measure(loss: Loss, rows: Tensor, weight: Tensor, target: Tensor) -> tuple[float, int, list[Tensor]]:
    """(CPU milliseconds, bytes live at most beside what is given, gradients) of one forward and backward."""
    rows, weight = (tensor.detach().clone().requires_grad_() for tensor in (rows, weight))
    with MemoryMeter.for_device(rows.device) as meter:
        meter.mark(("before",))
        backward(loss(rows, weight, target))
        meter.mark(("after",))
    peak_bytes = meter.peak_bytes
    rows.grad = weight.grad = None
    start = cpu_seconds()
    backward(loss(rows, weight, target))
    return 1e3 * (cpu_seconds() - start), peak_bytes, [t.grad for t in (rows, weight) if t.grad is not None]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative L2 error over all gradients."""
    off = sum((one.double() - other).square().sum() for one, other in zip(found, exact, strict=True))
    return math.sqrt(off / sum(other.square().sum() for other in exact))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m adacc_hf.eval.chunked_head", description=__doc__.partition("\n")[0]
    )
    for name, default in (("tokens", 1024), ("width", 256), ("vocabulary", 16384), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=positive_int, default=default)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    contenders: dict[str, Loss] = {"whole logits": whole, "ours": ours}
    if hasattr(F, "linear_cross_entropy"):
        contenders |= {f"torch, chunks {how}": torchs(how) for how in ("as it chooses", OURS)}
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        rows, weight = (
            (torch.randn(n, arguments.width, generator=generator) * scale).to(dtype)
            for n, scale in ((arguments.tokens, 1.0), (arguments.vocabulary, 0.02))
        )
        target = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator)
        *_, exact = measure(whole_in_float64, rows.double(), weight.double(), target)
        found: dict[str, list[tuple[float, int, list[Tensor]]]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name, loss in contenders.items():
                found[name].append(measure(loss, rows, weight, target))
        base = [ms for ms, *_ in found["whole logits"]]
        for name, results in found.items():
            ratios = Spread.of([ms / other for (ms, *_), other in zip(results, base, strict=True)])
            table.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "loss": name,
                    "ms": f"{statistics.median(ms for ms, *_ in results):.0f}",
                    "x whole logits": ratios.text(2),
                    "live at most": format_bytes(results[-1][1]),
                    "gradient error": f"{error(results[-1][2], exact):.1e}",
                }
            )
    print(markdown_table(table))
    return 0


def whole_in_float64(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss that others are compared with."""
    return F.cross_entropy(F.linear(rows, weight), target)


if __name__ == "__main__":
    sys.exit(main())
