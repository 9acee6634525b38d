"""What the planner says of a published measurement, by the code of `adacc plan`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Adapters, Workload
from adacc_hf.estimate.planning import Request, allocator_bytes, plain_ms, training_profile
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.eval.published.measurements import Row, Setting, model_config
from adacc_hf.eval.published.older_versions import as_in
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.solve.baselines import simulate_checkpointed
from adacc_hf.solve.simple_policies import uniform_policy

CHECKPOINTING = ("none", "full")
"""Every block keeps all that it saves, or runs under torch's checkpoint."""


def request_of(row: Setting, model_changes: dict[str, Any] | None = None) -> Request:
    """What `adacc plan` would be asked for a row, or for a run of a pair."""
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
        # Nothing that is predicted depends on the prices of codecs, or on a head that the run did not have.
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
    """The peak of a step of `row`, its moment, what it is made of, and times by the roofline.

    What its meter shows is the peak for a meter of live bytes, and else what the allocator keeps, where that is known.
    """
    started = time.process_time()
    request = request_of(row, model_changes)
    with as_in(row.older):
        static, profile = training_profile(request)
        reserved = None if row.counts_live_bytes else allocator_bytes(request, row.checkpointing == "full")
    outcome = outcome_of(profile, row.checkpointing)
    return {
        "status": Status.MEASURED.value,
        **({"predicted_bytes": outcome.peak_bytes} if reserved is None else _reserved(reserved, outcome)),
        "moment": outcome.peak_label,
        "head": profile.head,
        "stored_bytes": outcome.stored_bytes,
        "static": {name: nbytes for name, nbytes in asdict(static).items() if nbytes},
        "step_ms": plain_ms(profile) + outcome.overhead_ms,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _reserved(reserved: int, outcome: Outcome) -> Figures:
    """What the allocator keeps, and what of it is live at the peak."""
    return {"predicted_bytes": reserved, "peak_bytes": outcome.peak_bytes}


def outcome_of(profile: Profile, checkpointing: str) -> Outcome:
    """What a step of `profile` takes in a row's mode of checkpointing."""
    if checkpointing == "full":
        return simulate_checkpointed(profile)
    return simulate_policy(profile, uniform_policy(profile, "retain"))


def _adapters(row: Setting) -> Adapters | None:
    if row.lora is None:
        return None
    return Adapters(**{**row.lora, "targets": tuple(row.lora["targets"])})
