"""Checks by AdaccCallback when training begins: unsupported settings of the Trainer raise an error."""

from __future__ import annotations

from transformers import Trainer, TrainerCallback, TrainingArguments

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.trainer_guard import callbacks_of, calling_trainer
from adacc_hf.callbacks.trainer_loop import compiler_of, parallelism_of
from adacc_hf.torch_glue.compat import CHECKPOINTING, FLAG


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Raise ValueError if one process trains on several devices."""
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: nn.DataParallel calls one block from several threads, which AdaccCallback does not "
            f"support; start the run with `accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES to one device"
        )


def refuse_context_parallel(trainer: Trainer) -> None:
    """Raise ValueError if ranks hold parts of one sequence and use ring attention (context parallelism)."""
    parallelism = parallelism_of(trainer)
    if parallelism is not None and parallelism.cp_enabled:
        raise ValueError(
            f"cp_size={parallelism.cp_size}: in ring attention each rank runs different operators, and one policy "
            f"cannot fit all ranks; set cp_size=1 in ParallelismConfig, and share sequences by Ulysses instead "
            f"(sp_size={parallelism.cp_size}, sp_backend='deepspeed'), or train without AdaccCallback"
        )


def refuse_second_run(callback: TrainerCallback, trainer: Trainer | None) -> None:
    """Raise RuntimeError if `callback` begins a run while another Trainer, `trainer` unless None, uses it."""
    if trainer is not None and calling_trainer(callback)[0] is not trainer:
        raise RuntimeError(
            f"this {type(callback).__name__} is in use by another Trainer's run: give each Trainer a callback of its "
            f"own, or call detach() of this one if the other run was interrupted"
        )


def refuse_second_callback(callback: TrainerCallback, trainer: Trainer) -> None:
    """Raise ValueError if `trainer` has another callback of the same class, which would wrap the same blocks."""
    same = [other for other in callbacks_of(trainer) if isinstance(other, type(callback))]
    if any(other is not callback for other in same):
        raise ValueError(
            f"the Trainer has {len(same)} callbacks of class {type(callback).__name__}, and a block can follow only "
            f"one policy: leave one of them in callbacks=[...], or none if the Trainer's class has AdaccTrainerMixin"
        )


def is_compiled(trainer: Trainer) -> bool:
    """Return True if the run uses torch.compile. Raises ValueError for any backend other than Inductor."""
    backend = compiler_of(trainer) or (trainer.args.torch_compile_backend if trainer.args.torch_compile else None)
    if backend is None:
        return False
    if backend != "inductor":
        raise ValueError(
            f"torch_compile_backend={backend!r}: AdaccCallback supports only Inductor's graphs; use 'inductor', "
            f"or train without torch_compile"
        )
    return True


def refuse_offload(args: TrainingArguments) -> None:
    """Raise ValueError if a setting of Transformers or TRL moves activations to the host, as the policy may."""
    settings = {f"{name}_kwargs": getattr(args, f"{name}_kwargs", None) for name in (CHECKPOINTING, FLAG)}
    kwargs = {name: each for name, each in settings.items() if isinstance(each, dict)}
    offloads = [f"{name}={{'offload': True}}" for name, each in kwargs.items() if each.get("offload")]
    offloads += ["activation_offloading=True"] if getattr(args, "activation_offloading", False) else []
    if offloads:
        raise ValueError(
            f"{offloads[0]}: AdaccCallback decides for each activation whether it moves to host memory; leave this "
            f'setting out, and set AdaccConfig(host_memory="64GiB"), or another limit, instead'
        )


def refuse_host_memory(config: AdaccConfig) -> None:
    """Raise ValueError if compiled graphs are to store payloads in host memory."""
    if config.host_memory is not None:
        raise ValueError(
            f"host_memory={config.host_memory!r} with torch_compile=True: compiled graphs keep all payloads on the "
            f"device; set host_memory=None, or train without torch_compile"
        )
