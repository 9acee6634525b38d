"""`adacc plan`: what a training run would take on a device that need not be here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.ahead.devices import NAMES
from adacc_hf.units import parse_bytes

if TYPE_CHECKING:
    from adacc_hf.ahead.planning import Planned, Request

_PRECISIONS = ("fp32", "bf16", "bf16-amp", "fp16-amp")


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `adacc`."""
    parser = commands.add_parser(
        "plan", help="tell, without a GPU and without weights, whether training fits a device and what it costs"
    )
    parser.add_argument("--model", required=True, help="preset, hub id or folder of a language model's config")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per device and step (default 8)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence; left out, the longest the model can take")
    parser.add_argument(
        "--dtype",
        choices=_PRECISIONS,
        default="bf16-amp",
        help="fp32 and bf16 hold everything in that dtype; -amp is float32 with autocast (default bf16-amp)",
    )
    parser.add_argument("--attn", choices=("sdpa", "eager"), default="sdpa", help="attention (default sdpa)")
    parser.add_argument(
        "--optimizer", default="adamw", help="adamw (fused), adamw_foreach, adamw_8bit, lion, ... (default adamw)"
    )
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(NAMES)} (default h100)")
    parser.add_argument("--budget", help="memory per device, such as 20GiB (default: the device's less 5 percent)")
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--ddp", type=int, metavar="N", help="data parallel on N devices")
    shared.add_argument("--fsdp", type=int, metavar="N", help="fully sharded on N devices")
    shared.add_argument("--zero", type=int, nargs=2, metavar=("STAGE", "N"), help="DeepSpeed ZeRO 1, 2 or 3 on N")
    parser.add_argument("--peft", choices=("lora",), help="train adapters only")
    parser.add_argument("--profile", type=Path, help="price with this saved profile instead of a trace and a roofline")
    parser.add_argument("--trace", choices=("cuda", "cpu"), help="whose operators to trace (default: the device's)")
    parser.add_argument(
        "--outlier-share",
        type=float,
        default=0.01,
        help="share of the channels taken as outliers, 0 to 1 (default 0.01)",
    )
    parser.add_argument("--no-largest", action="store_true", help="do not look for the largest batch and sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    parser.add_argument("--html", type=Path, metavar="DIR", help="also write the report into this folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The plan that `arguments` ask for, as text or JSON."""
    from adacc_hf.ahead.planning import plan
    from adacc_hf.ahead.planning_text import to_json, to_text

    planned = plan(_request(arguments))
    if arguments.html is not None:
        _write_report(arguments.html, planned)
    return json.dumps(to_json(planned), indent=1) if arguments.json else to_text(planned)


def _request(arguments: argparse.Namespace) -> Request:
    from adacc_hf.ahead.devices import find_device
    from adacc_hf.ahead.fake_model import PRECISIONS, Workload
    from adacc_hf.ahead.model_presets import checked_seq_len, context_length, load_config
    from adacc_hf.ahead.planning import Request
    from adacc_hf.ahead.static_memory import check_optimizer
    from adacc_hf.profile import Profile

    device = find_device(arguments.device)
    check_optimizer(arguments.optimizer)
    sharding = _sharding(arguments)
    if not 0 <= arguments.outlier_share <= 1:
        raise ValueError(f"--outlier-share={arguments.outlier_share} is outside 0 to 1: it is a share of the channels")
    config = load_config(arguments.model)
    workload = Workload(
        config=config,
        device=device,
        precision=PRECISIONS[arguments.dtype],
        attention=arguments.attn,
        peft=arguments.peft,
        trace=arguments.trace or device.trace,
        sharding=sharding,
        outlier_share=arguments.outlier_share,
    )
    return Request(
        model=arguments.model,
        workload=workload,
        batch_size=arguments.batch_size,
        seq_len=checked_seq_len(arguments.seq_len, config, option="--seq-len"),
        optimizer=arguments.optimizer,
        budget_bytes=None if arguments.budget is None else parse_bytes(arguments.budget, "--budget"),
        longest_seq_len=context_length(config),
        find_largest=not arguments.no_largest,
        profile=None if arguments.profile is None else Profile.load(arguments.profile),
    )


def _sharding(arguments: argparse.Namespace) -> Any:
    from adacc_hf.ahead.static_memory import Sharding

    if arguments.ddp is not None:
        return Sharding(method="ddp", num_devices=arguments.ddp)
    if arguments.fsdp is not None:
        return Sharding(method="fsdp", num_devices=arguments.fsdp)
    if arguments.zero is not None:
        stage, num_devices = arguments.zero
        if stage not in (1, 2, 3):
            raise ValueError(f"--zero {stage} {num_devices} has no such stage: choose 1, 2 or 3")
        return Sharding(method=f"zero{stage}", num_devices=num_devices)
    return Sharding()


def _write_report(folder: Path, planned: Planned) -> None:
    from adacc_hf.ahead.planning_text import remarks
    from adacc_hf.policy import Policy
    from adacc_hf.reports.report import write_report

    policy = planned.policy or Policy.uniform(planned.profile, "recompute")
    comparison = [
        {
            "method": name,
            "fits": "yes" if forecast.fits else "no",
            "peak_bytes": forecast.peak_bytes,
            "step_ms": forecast.step_ms,
            "largest_batch": forecast.largest_batch,
            "longest_seq_len": forecast.longest_seq_len,
        }
        for name, forecast in planned.forecasts.items()
    ]
    write_report(folder, profile=planned.profile, policy=policy, comparison=comparison, remarks=remarks(planned))
