"""Runs in which an AdaccCallback cannot do its work, refused or reported when they begin."""

from __future__ import annotations

import logging

from transformers import Trainer, TrainerCallback, TrainingArguments

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.trainer import (
    TrainerGuard,
    Unguarded,
    callbacks_of,
    calling_trainer,
    compiler_of,
    parallelism_of,
)
from adacc_hf.torch_glue.compat import CHECKPOINTING

log = logging.getLogger(__name__)


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Raise ValueError where one process trains on several devices."""
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: nn.DataParallel calls one block from several threads, which AdaccCallback does not "
            f"support; start the run with `accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES to one device"
        )


def refuse_context_parallel(trainer: Trainer) -> None:
    """Raise ValueError where ranks have parts of one sequence and attend in a ring."""
    parallelism = parallelism_of(trainer)
    if parallelism is not None and parallelism.cp_enabled:
        raise ValueError(
            f"cp_size={parallelism.cp_size}: in ring attention each rank runs other operators, and one policy cannot "
            f"fit them all; set cp_size=1 in ParallelismConfig and give AdaccCallback a memory_budget, or train "
            f"without AdaccCallback"
        )


def refuse_second_run(callback: TrainerCallback, guard: TrainerGuard | Unguarded) -> None:
    """Raise RuntimeError if `callback`, whose present run has `guard`, is asked to begin one of another Trainer."""
    found = calling_trainer(callback)
    if guard.trainer is not None and found is not None and found[0] is not guard.trainer:
        raise RuntimeError(
            f"this {type(callback).__name__} is at work in another Trainer's run: give each Trainer one of its own, or "
            f"call its detach() if that run was broken off"
        )


def refuse_second_callback(callback: TrainerCallback, trainer: Trainer) -> None:
    """Raise ValueError if `trainer` has another callback of the same class, which would want the same blocks."""
    same = [other for other in callbacks_of(trainer) if isinstance(other, type(callback))]
    if any(other is not callback for other in same):
        raise ValueError(
            f"the Trainer has {len(same)} callbacks of class {type(callback).__name__}, and a block can follow one "
            f"policy only: leave one of them in callbacks=[...]"
        )


def is_compiled(args: TrainingArguments, trainer: Trainer | None) -> bool:
    """Whether the run compiles its model: by its arguments, or by the backend that Accelerate was launched with.

    Raises ValueError for a way of compiling that has no partitioner.
    """
    launched_with = None if trainer is None else compiler_of(trainer)
    backend = launched_with or (args.torch_compile_backend if args.torch_compile else None)
    if backend is None:
        return False
    if backend != "inductor":
        raise ValueError(
            f"torch_compile_backend={backend!r}: AdaccCallback decides inside Inductor's graphs only; use 'inductor', "
            f"or train without torch_compile"
        )
    return True


def warn_of_checkpointing(args: TrainingArguments, config: AdaccConfig) -> None:
    """Say that a policy takes the place of torch's checkpointing, which TRL's arguments switch on by default."""
    if getattr(args, CHECKPOINTING, False):  # without a Trainer, whoever calls gives what arguments there are
        log.warning(
            "Adacc: %s=True (the default of TRL's arguments): once there is a policy, it takes the place of "
            "checkpointing, and its peak may be higher than that of checkpointing, as memory_budget=%r allows; set "
            "%s=False to have this line no more, and a smaller memory_budget to save more",
            CHECKPOINTING,  # TRL sets the older name; set, the newer one of Transformers 5.23 goes before it
            config.memory_budget,
            CHECKPOINTING,
        )
