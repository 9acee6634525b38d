"""BatchedSteps: lets a Trainer train each optimizer step on micro-batches that are as large as the budget allows.

The Trainer's own loader and sampler choose the samples of a step: `gradient_accumulation_steps` batches. They arrive
uncollated, and are divided (adapt/byte_batches.py). The Trainer still counts as many micro-batches as before: all but
the last one are empty, and the last one trains on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer

from adacc_hf.adapt.byte_batches import ByteBatches, uncollated
from adacc_hf.adapt.session import AdaccSession
from adacc_hf.callbacks.trainer_loop import compiler_of, parallelism_of


class Step(dict[str, Any]):
    """Micro-batches of one optimizer step. As a dictionary, what the Trainer counts tokens by: a tensor as large as all
    inputs, and a mask with their sum."""

    def __init__(self, batches: list[Any], main_input: str) -> None:
        num_tokens = sum(batch[main_input].numel() for batch in batches if main_input in batch)
        num_unmasked = sum(int(batch["attention_mask"].sum()) for batch in batches if "attention_mask" in batch)
        counts = {main_input: torch.empty(num_tokens, device="meta"), "attention_mask": torch.tensor(num_unmasked)}
        super().__init__(counts)
        self.batches = batches


class BatchedSteps:
    """Micro-batches by bytes in one run of a Trainer. Call `close` at its end."""

    def __init__(self, trainer: Trainer, session: AdaccSession) -> None:
        _refuse_unsupported(trainer)
        self._trainer, self._session = trainer, session
        self._batches = session.state.byte_batches = ByteBatches(session.state, trainer.args.train_batch_size)
        self._uncollated = uncollated(trainer.callback_handler.train_dataloader)
        self._collate_fn = self._uncollated.__enter__()

    def close(self) -> None:
        """Restore the loader."""
        self._uncollated.__exit__(None, None, None)

    def get_batch_samples(
        self, get: Callable[..., tuple[list[Any], Any]], samples: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return as many items as the Trainer expects, the last with all micro-batches of the step, and the number of
        their labels, which the Trainer's own method `get` counts."""
        drawn = list(islice(samples, num_batches))
        if not drawn:
            return [], None
        batches = self._batches.divide([row for each in drawn for row in each.rows], self._collate_fn)
        _, num_items = get(iter(batches), len(batches), device)
        self._session.state.loop.num_micro = len(batches)
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        return [*(Step([], name) for _ in drawn[1:]), Step(batches, name)], num_items

    def train(self, step: Callable[..., torch.Tensor], model: Any, inputs: Step, *args: Any, **kwargs: Any) -> Any:
        """Train on the micro-batches of `inputs`, and return the sum of their losses."""
        trainer = self._trainer
        total = torch.zeros((), device=trainer.args.device)
        weights = self._batches.weights(inputs.batches) if inputs.batches else []
        for number, (batch, weight) in enumerate(zip(inputs.batches, weights, strict=True), start=1):
            is_last = number == len(weights)
            # A loss that is not divided by the labels of the whole step is divided by this attribute.
            trainer.current_gradient_accumulation_steps = 1 / weight if weight else float("inf")
            with nullcontext() if is_last else trainer.accelerator.no_sync(model):
                total += self._session.train(partial(step, model, batch, *args, **kwargs), batch)
        return total


def _refuse_unsupported(trainer: Trainer) -> None:
    """Raise ValueError if ranks share samples (tensor parallelism), and under torch.compile or DeepSpeed."""
    args, parallelism = trainer.args, parallelism_of(trainer)
    loader = trainer.callback_handler.train_dataloader
    is_shared = parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled or parallelism.sp_enabled)
    reasons = {
        "DeepSpeed, which counts micro-batches itself": trainer.accelerator.distributed_type
        == DistributedType.DEEPSPEED,
        "tensor, context or sequence parallelism, whose ranks need equal batches": is_shared,
        "a model that was sharded while it was loaded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "torch_compile": args.torch_compile or compiler_of(trainer) is not None,
        "dispatch_batches=True, which collates on one rank": hasattr(loader, "slice_fn"),
        "average_tokens_across_devices=False on several ranks": args.world_size > 1
        and not args.average_tokens_across_devices,
        "one sample per step: set gradient_accumulation_steps": args.train_batch_size * args.gradient_accumulation_steps
        == 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"batch_by_bytes=True does not work with {reason}")
