"""Whether a Trainer's run is compiled, and how Adacc joins it; Inductor, slow to import, is imported only then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainingArguments

from adacc_hf.config import AdaccConfig
from adacc_hf.errors import AdaccError
from adacc_hf.files import read_json
from adacc_hf.ranks import from_first_rank
from adacc_hf.run_files import COMPILED_FILE, HISTORY_FILE

if TYPE_CHECKING:
    from adacc_hf.callbacks.compiled_run import CompiledRun

log = logging.getLogger(__name__)


def is_compiled(args: TrainingArguments, trainer: Trainer | None) -> bool:
    """Whether the run compiles its model. Raises ValueError for a way of compiling that has no partitioner."""
    plugin = None if trainer is None else trainer.accelerator.state.dynamo_plugin
    backend = args.torch_compile_backend if args.torch_compile else None
    if plugin is not None and plugin.backend.value.lower() != "no":
        backend = plugin.backend.value.lower()
    if backend is None:
        return False
    if backend != "inductor":
        raise ValueError(
            f"torch_compile_backend={backend!r}: AdaccCallback decides inside Inductor's graphs only; use 'inductor', "
            f"or train without torch_compile"
        )
    return True


def begin_compiled_run(
    config: AdaccConfig, model: Any, note: Callable[..., None], given: Any, checkpoint: str | Path | None
) -> tuple[CompiledRun, list[dict[str, Any]]]:
    """A run under the policy file `given`, or the one in `checkpoint`, or one that is still to be found; its history.

    A checkpoint's is followed if it was found for the same budget, and all that is needed for it was measured.

    Raises ValueError for a policy of runs without torch_compile.
    """
    from adacc_hf.callbacks.compiled_run import CompiledRun
    from adacc_hf.partitioner import CompiledPolicy

    if given is not None and not isinstance(given, (str, Path)):
        raise ValueError(
            f"policy={type(given).__name__} belongs to runs without torch_compile=True: compiled graphs take the path "
            f"of an {COMPILED_FILE} that such a run left in its checkpoint"
        )

    def load() -> tuple[CompiledPolicy | None, list[dict[str, Any]]]:
        kept = None if checkpoint is None else Path(checkpoint) / COMPILED_FILE
        if given is not None or kept is None or not kept.is_file():
            return None if given is None else CompiledPolicy.load(given), []
        policy, history = CompiledPolicy.load(kept), read_json(kept.with_name(HISTORY_FILE), AdaccError, "history")
        if policy.settled_for != config.memory_budget:
            log.info(
                "Adacc: %s is settled for %r, not %r: deciding anew", kept, policy.settled_for, config.memory_budget
            )
            policy = None
        return policy, history

    # The first rank decides, also where the others do not see its files: all ranks must measure peaks, or none.
    policy, history = from_first_rank(load)
    return CompiledRun(config, model, note, policy), history
