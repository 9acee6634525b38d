"""Predictions for published measurements of memory, by the code of `adacc plan`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.adapters import Adapters
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.planning import Request, allocator_bytes, plain_ms, training_profile
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.repository.published.measurements import Row, Setting, model_config
from adacc_hf.eval.repository.published.older_versions import older_behaviours
from adacc_hf.solve.baselines import simulate_checkpointed
from adacc_hf.solve.simple_policies import uniform_policy

CHECKPOINTING = ("none", "full")
"""Modes of checkpointing: no checkpoints, or torch's checkpoint around every block."""


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

    For a meter of live bytes, the prediction is the peak. For other meters, the prediction is the bytes that the
    allocator keeps, if they can be predicted.
    """
    start_s = time.process_time()
    request = request_of(row, model_changes)
    with older_behaviours(row.older):
        static, profile = training_profile(request)
        reserved_bytes = None if row.counts_live_bytes else allocator_bytes(request, row.checkpointing == "full")
    outcome = outcome_of(profile, row.checkpointing)
    return {
        "status": Status.MEASURED.value,
        **(
            {"predicted_bytes": outcome.peak_bytes}
            if reserved_bytes is None
            else _reserved_figures(reserved_bytes, outcome)
        ),
        "moment": outcome.peak_label,
        "head": profile.head,
        "stored_bytes": outcome.stored_bytes,
        "static": {name: nbytes for name, nbytes in asdict(static).items() if nbytes},
        "step_ms": plain_ms(profile) + outcome.overhead_ms,
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }


def _reserved_figures(reserved_bytes: int, outcome: Outcome) -> Figures:
    """Return the bytes that the allocator keeps, and the live bytes at the peak."""
    return {"predicted_bytes": reserved_bytes, "peak_bytes": outcome.peak_bytes}


def outcome_of(profile: Profile, checkpointing: str) -> Outcome:
    """Simulate a step of `profile` under a row's mode of checkpointing."""
    if checkpointing == "full":
        return simulate_checkpointed(profile)
    return simulate_policy(profile, uniform_policy(profile, "retain"))


def _adapters(row: Setting) -> Adapters | None:
    if row.lora is None:
        return None
    return Adapters(**{**row.lora, "targets": tuple(row.lora["targets"])})
