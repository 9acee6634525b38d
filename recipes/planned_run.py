"""Plan of a Trainer run, as `adacc plan` would make it, with the settings from TrainingArguments and the launcher."""

import os
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, TrainingArguments

from adacc_hf import AdaccConfig, solve_policy
from adacc_hf.artifacts.units import parse_bytes
from adacc_hf.estimate.devices import NAMES, Device, find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.planning import Request, TrainingPlan, plan
from adacc_hf.estimate.static_memory import Sharding

OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw_foreach",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "lion_8bit": "lion_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Names of optimizers in `adacc plan`, by the Trainer's names of the same optimizers."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of the run to plan that are not in TrainingArguments."""

    model: str
    config: PretrainedConfig
    attention: str
    seq_len: int
    device: str
    """Name of a device in the table of `adacc plan`, or "auto" for this machine's device."""
    adacc: AdaccConfig
    find_largest: bool


def plan_run(run: Run, training: TrainingArguments) -> TrainingPlan:
    """Return the plan that `adacc plan` would make for the run. Raises ValueError if the run cannot be planned."""
    device = local_device() if run.device == "auto" else find_device(run.device)
    if training.optim not in OPTIMIZERS:
        raise ValueError(
            f"--optim={training.optim.value} is not known to the planner; choose from {', '.join(OPTIMIZERS)}"
        )
    request = Request(
        model=run.model,
        workload=Workload(
            config=run.config,
            device=device,
            precision=PRECISIONS["bf16-amp" if training.bf16 else "fp16-amp" if training.fp16 else "fp32"],
            attention=run.attention,
            trace=device.trace,
            sharding=sharding_of(training),
            adacc=run.adacc,
        ),
        batch_size=training.per_device_train_batch_size,
        seq_len=run.seq_len,
        optimizer=OPTIMIZERS[training.optim],
        find_largest=run.find_largest,
    )
    if isinstance(run.adacc.memory_budget, float):
        profile = plan(replace(request, find_largest=False)).profile
        budget = solve_policy(profile, run.adacc.memory_budget, run.adacc).predicted_peak_bytes
    elif run.adacc.memory_budget == "auto":
        budget = None
    else:
        budget = parse_bytes(str(run.adacc.memory_budget), "memory_budget")
    try:
        return plan(replace(request, budget_bytes=budget))
    except ValueError as error:
        raise ValueError(f"--memory_budget={run.adacc.memory_budget}: `adacc plan` says: {error}") from error


def local_device() -> Device:
    """Return this machine's entry in the device table of `adacc plan`. The entry is for the first GPU, with its actual
    memory, or for the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return find_device("cpu")
    properties = torch.cuda.get_device_properties(0)
    words = properties.name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    device_name = next((name for name in NAMES if name in words), None)
    if device_name is None:
        raise ValueError(
            f"--device=auto: the table of devices has no {properties.name}; choose the most similar device of "
            f"{', '.join(NAMES)}"
        )
    return replace(find_device(device_name), memory_bytes=properties.total_memory)


def sharding_of(training: TrainingArguments) -> Sharding:
    """Return the sharding method and the number of ranks with which the run was launched."""
    if training.world_size == 1:
        return Sharding()
    method = "fsdp" if training.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"
    if training.deepspeed_plugin is not None and training.deepspeed_plugin.zero_stage > 0:
        method = f"zero{training.deepspeed_plugin.zero_stage}"
    return Sharding(method=method, num_devices=training.world_size)
