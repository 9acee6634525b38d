"""Predictions by the code of `adacc plan`, compared with published measurements of memory and speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers.loss import loss_utils

from adacc_hf.artifacts.block_outcome import rerun_ms
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile, Operator
from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.adapters import Adapters
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.planning import Request, TrainingPlanner, plain_ms
from adacc_hf.estimate.static_memory import PRECISIONS, Sharding
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.repository.published.measurements import Pair, Row, Setting, model_config
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy

# Behaviours of earlier versions of torch and Transformers, for runs that were measured with them.


class _SoftmaxWithInput(torch.autograd.Function):
    """Softmax that saves its input for backward, in addition to its output."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        probabilities = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, probabilities)
        ctx.dim = dim
        return probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _, probabilities = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], probabilities, ctx.dim, probabilities.dtype), None


def _softmax_before_1_11(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    # Autocast runs softmax in float32, on a copy of the input. The copy is saved.
    is_autocast = torch.is_autocast_enabled(scores.device.type)
    return _SoftmaxWithInput.apply(scores.to(torch.float32 if is_autocast else dtype or scores.dtype), dim)


def _loss_before_4_50(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, ignore_index: int = -100, **_: Any
) -> torch.Tensor:
    logits = logits.float()
    shifted_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return functional.cross_entropy(shifted_logits, labels[..., 1:].contiguous().view(-1), ignore_index=ignore_index)


OLDER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "softmax keeps its input": lambda: patch.object(functional, "softmax", _softmax_before_1_11),
    "the loss copies the shifted logits": lambda: patch.dict(
        loss_utils.LOSS_MAPPING, {"ForCausalLM": _loss_before_4_50}
    ),
}
"""Patches by the behaviour that they restore: the behaviour of torch before 1.11 (March 2022), and of Transformers
before 4.50 (March 2025)."""


@contextmanager
def older_behaviours(behaviours: Sequence[str]) -> Iterator[None]:
    """While open, give torch and Transformers these `behaviours` of earlier versions."""
    with ExitStack() as stack:
        for name in behaviours:
            stack.enter_context(OLDER[name]())
        yield


# Predictions for published measurements of memory.

RESERVED_SHARE = 1.05
"""Bytes that torch's allocator reserves, divided by the peak of live bytes. The open half's rows have 0.98 to 1.10."""


def request_of(row: Setting, model_changes: dict[str, Any] | None = None) -> Request:
    """Return the request to `adacc plan` for a row, or for a run of a pair."""
    device = find_device(row.device)
    workload = Workload(
        config=model_config(row.model, model_changes),
        device=device,
        precision=PRECISIONS[row.precision],
        attention=row.attention,
        adapters=_adapters(row),
        compact_rank=row.compact_rank,
        trace=device.trace,
        sharding=Sharding(method=row.sharding, num_devices=row.devices),
        # The predictions depend neither on costs of codecs, nor on a head that the run did not have.
        adacc=AdaccConfig(actions=("retain", "recompute"), head=row.head),
    )
    return Request(
        model=row.model,
        workload=workload,
        batch_size=row.batch,
        seq_len=row.length,
        optimizer=row.optimizer,
        accumulates=row.accumulates,
    )


def predict(row: Row, model_changes: dict[str, Any] | None = None) -> Figures:
    """Predict the peak of a step of `row`, the moment and the parts of this peak, and the step's roofline times.

    For a meter of live bytes, the prediction is the peak. For other meters, it is the peak with the allocator's
    fragments.
    """
    start_s = time.process_time()
    request = request_of(row, model_changes)
    with older_behaviours(row.older), fake_model(request.workload) as model:
        planner = TrainingPlanner(request, model)
        static, profile = planner.static, planner.profile()
    outcome = outcome_of(profile, row.checkpointing)
    return {
        "status": Status.MEASURED.value,
        "predicted_bytes": round((1.0 if row.counts_live_bytes else RESERVED_SHARE) * outcome.peak_bytes),
        "moment": outcome.peak_label,
        "head": profile.head,
        "stored_bytes": outcome.stored_bytes,
        "static": {name: nbytes for name, nbytes in asdict(static).items() if nbytes},
        "step_ms": plain_ms(profile) + outcome.overhead_ms,
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }


def outcome_of(profile: Profile, checkpointing: str) -> Outcome:
    """Simulate a step of `profile` under a row's mode of checkpointing."""
    policy = checkpoint_policy(profile) if checkpointing == "full" else uniform_policy(profile, "retain")
    return simulate_policy(profile, policy)


def _adapters(row: Setting) -> Adapters | None:
    if row.lora is None:
        return None
    return Adapters(**{**row.lora, "targets": tuple(row.lora["targets"])})


# Predictions for published pairs of speeds.


_PRODUCTS = ("mm", "addmm")


def predict_pair(pair: Pair) -> Figures:
    """Predict the time of the other run divided by the time of the base run, for the same number of tokens."""
    start_s = time.process_time()
    base_ms, other_ms = (step_ms(setting) / (setting.batch * setting.length) for setting in pair.settings)
    return {
        "status": Status.MEASURED.value,
        "ratio": other_ms / base_ms,
        "tokens_per_ms": [1 / base_ms, 1 / other_ms],
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }


def step_ms(setting: Setting) -> float:
    """Return the milliseconds of one forward and backward of `setting`."""
    profile = _profile_of(json.dumps({**asdict(setting), "checkpointing": "none"}))
    return plain_ms(profile) + MODES[setting.checkpointing](profile)


@lru_cache(maxsize=2)
def _profile_of(setting: str) -> Profile:
    """Return the profile of a step of a setting (as JSON), which is equal for all modes of checkpointing."""
    parsed_setting = Setting(**json.loads(setting))
    request = request_of(parsed_setting)
    with older_behaviours(parsed_setting.older), fake_model(request.workload) as model:
        return TrainingPlanner(request, model).profile()


def _every_block(of_kind: Callable[[KindProfile], float]) -> Callable[[Profile], float]:
    return lambda profile: sum(of_kind(profile.kind_of(block)) for block in profile.blocks)


def _second_blocks(profile: Profile) -> float:
    return sum(rerun_ms(profile.kind_of(block)) for block in profile.blocks[::2])


def _cheap_operators(kind: KindProfile) -> float:
    """Return the recomputed ms: all operators up to the last saved tensor, except attention and every second product
    (torchtitan, apply_ac)."""
    products = [operator for operator in kind.operators if _name(operator) in _PRODUCTS]
    attention = [operator for operator in kind.operators if "scaled_dot_product" in _name(operator)]
    saved_indices = {operator.index for operator in (*products[::2], *attention)}
    last = max(kind.values[value].producer or 0 for value in kind.slots if value >= 0)
    return sum(operator.ms for operator in kind.operators[: last + 1] if operator.index not in saved_indices)


def _core_attention(kind: KindProfile) -> float:
    """Return the ms of core attention: from the product of queries and keys to the product with the values
    (Korthikanti et al., section 5)."""
    batched = [operator.index for operator in kind.operators if _name(operator) == "bmm"]
    return sum(operator.ms for operator in kind.operators[batched[0] : batched[-1] + 1])


def _name(operator: Operator) -> str:
    return operator.name.split(".")[1]


MODES: dict[str, Callable[[Profile], float]] = {
    "none": lambda profile: 0.0,
    "full": _every_block(rerun_ms),
    "full, whole block": _every_block(lambda kind: kind.forward_ms),
    "every second block": _second_blocks,
    "by operator": _every_block(_cheap_operators),
    "core attention": _every_block(_core_attention),
}
"""Recomputed milliseconds by the name of the mode. In Megatron's checkpoints, reentrant checkpoints and checkpoints
of compiled blocks, recomputation always runs to the end of the block."""
