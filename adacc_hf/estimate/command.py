"""`adacc plan`: predict memory and time of a training run, on a device that need not be present, as text or JSON."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.budget_values import MIN_BUDGET_BYTES, budget_hint
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.units import UNITS, parse_bytes
from adacc_hf.estimate.devices import NAMES, find_device
from adacc_hf.estimate.presets import PRESETS, check_model
from adacc_hf.estimate.static_memory import COMPACT, OPTIMIZERS, PRECISIONS, Sharding, check_optimizer

if TYPE_CHECKING:
    from adacc_hf.estimate.planning import Request

log = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `adacc`."""
    parser = commands.add_parser(
        "plan",
        help="predict, without a GPU and without weights, if training fits a device, and its memory and time",
        usage="adacc plan --model MODEL [options]",
    )
    parser.add_argument(
        "--model", required=True, help=f"preset ({', '.join(PRESETS)}), or hub id or folder of a config.json"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per device and step (default 8)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the model's context length)")
    parser.add_argument(
        "--dtype",
        choices=tuple(PRECISIONS),
        default="bf16-amp",
        help="fp32 and bf16 use that dtype for all tensors; with -amp, products have it by autocast, and weights are "
        "float32, or bfloat16 in bf16-weights-amp (default bf16-amp)",
    )
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(NAMES)} (default h100)")
    parser.add_argument(
        "--budget", help="memory per device, such as 20GiB (default: the device's memory minus 5 percent)"
    )
    parser.add_argument("--exact", action="store_true", help="use no lossy codec and no chunked head or tiles")
    parser.add_argument("--peft", choices=("lora",), help="train adapters only")
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--ddp", type=int, metavar="N", help="data parallel on N devices")
    shared.add_argument("--fsdp", type=int, metavar="N", help="fully sharded on N devices")
    shared.add_argument("--zero", type=int, nargs=2, metavar=("STAGE", "N"), help="DeepSpeed ZeRO 1, 2 or 3 on N")
    more = parser.add_argument_group("more options")
    more.add_argument(
        "--attn", choices=("sdpa", "eager"), help="attention (default: sdpa, or eager if the model has no sdpa)"
    )
    more.add_argument("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default adamw, fused)")
    more.add_argument(
        "--rank",
        help="rank for --optimizer compact: a fraction of a layer's inputs, or a number of them (default 0.25)",
    )
    more.add_argument(
        "--images",
        type=int,
        metavar="N",
        help="images in each sequence, in a vision-language model with images of a fixed size. The number of their "
        "tokens follows from the model's config, and --seq-len counts these tokens too (default: no images)",
    )
    more.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of the host that each device may use for activations, such as 64GiB (default: none)",
    )
    more.add_argument(
        "--host-bandwidth",
        metavar="SIZE",
        help="bytes per second between device and host, such as 25GB, with all devices copying at once (default: 80 "
        "percent of the device's PCIe generation)",
    )
    more.add_argument("--lora-rank", type=int, help="rank for --peft lora (default: PEFT's, 8)")
    more.add_argument(
        "--lora-targets", nargs="+", metavar="NAME", help="layers with adapters (default: PEFT's for the architecture)"
    )
    more.add_argument("--lora-dropout", type=float, help="dropout before the adapters, 0 to 1 (default: PEFT's, 0)")
    more.add_argument(
        "--modules-to-save", nargs="+", metavar="NAME", help="modules trained in full next to the adapters"
    )
    more.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="weights of bitsandbytes' 4 bits, for --peft lora (default: as the config's quantization_config says). "
        "Weights of 8 bits are not planned",
    )
    more.add_argument(
        "--accumulate",
        action="store_true",
        help="plan for several micro-batches per step (gradient_accumulation_steps > 1)",
    )
    more.add_argument(
        "--trace", choices=("cuda", "cpu"), help="trace the operators of this device type (default: the device's)"
    )
    more.add_argument(
        "--largest",
        action="store_true",
        help="print the largest batch, the longest sequence and its time per token for five methods, and nothing else "
        "(takes minutes)",
    )
    more.add_argument(
        "--batches",
        metavar="FILE",
        help="divide samples with the lengths in FILE, --batch-size of them per step and --seq-len tokens at most, "
        "into micro-batches by bytes, and print nothing else",
    )
    more.add_argument("--json", action="store_true", help="print one JSON record")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """Compute the prediction that `arguments` ask for, and return it as text or JSON. Progress is printed on stderr."""
    _convert_options(arguments)
    with _progress_on_stderr():
        log.info("loading torch and Transformers")
        from adacc_hf.estimate.largest import largest_json, largest_shapes, largest_text
        from adacc_hf.estimate.plan_report import to_json, to_text
        from adacc_hf.estimate.planning import plan

        request = _plan_request(arguments)
        if arguments.batches is not None:
            from adacc_hf.estimate.planned_batches import batches_text, planned_batches, read_lengths

            report = planned_batches(request, read_lengths(arguments.batches))
            return json.dumps(asdict(report), indent=1) if arguments.json else batches_text(request, report)
        if arguments.largest:
            largest = largest_shapes(request)
            as_json = largest_json(request, largest)
            return json.dumps(as_json, indent=1) if arguments.json else largest_text(request, largest)
        training_plan = plan(request)
    return json.dumps(to_json(training_plan), indent=1) if arguments.json else to_text(training_plan)


@contextmanager
def _progress_on_stderr() -> Iterator[None]:
    """Print the planner's log on stderr inside the `with` block."""
    logger, handler = logging.getLogger(__package__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# Checks of the options, which need no torch, and their conversion.

_NEEDS = {
    "--rank": f"--optimizer {COMPACT}",
    "--host-bandwidth": "--host-memory",
    **dict.fromkeys(
        ("--lora-rank", "--lora-targets", "--lora-dropout", "--modules-to-save", "--load-in-4bit"), "--peft lora"
    ),
}
"""Options that have no effect without another one, which may have a value."""


_RANGES = {
    "--images": (lambda number: number >= 1, "at least 1: the images in each sequence"),
    "--lora-rank": (lambda number: number >= 1, "at least 1"),
    "--lora-dropout": (lambda share: 0 <= share < 1, "at least 0 and below 1"),
}
"""Condition on an option's value, as code and as text."""


def _convert_options(arguments: argparse.Namespace) -> None:
    """Check the options, and replace sizes by bytes. `arguments.sharding` is the sharding of all options for it."""
    if arguments.device != "cpu":  # whose rates are measured
        find_device(arguments.device).check_dtype(PRECISIONS[arguments.dtype].compute)
    check_optimizer(arguments.optimizer)
    for option, needed in _NEEDS.items():
        name, _, value = needed.partition(" ")
        has_needed = _value_of(arguments, name) == value if value else _value_of(arguments, name) is not None
        if _value_of(arguments, option) is not None and not has_needed:
            raise ValueError(f"{option} needs {needed}: pass both options, or neither")
    for option, (is_allowed, rule) in _RANGES.items():
        number = _value_of(arguments, option)
        if number is not None and not is_allowed(number):
            raise ValueError(f"{option}={number} must be {rule}")
    arguments.sharding = _plan_sharding(arguments)
    for option in ("--budget", "--host-memory", "--host-bandwidth"):
        setattr(arguments, _attribute(option), _option_bytes(_value_of(arguments, option), option))
    if arguments.host_memory is not None and arguments.device == "cpu":
        raise ValueError("--host-memory: a CPU has no other memory; choose a GPU as --device")
    check_model(arguments.model)


def _value_of(arguments: argparse.Namespace, option: str) -> Any:
    """Return the value of an option, or None if it was not passed."""
    value = getattr(arguments, _attribute(option))
    return None if value is False else value


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _option_bytes(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    advice = (
        f'pass a size of at least {MIN_BUDGET_BYTES} bytes, such as "20GiB" ({UNITS}), not a fraction, or leave out '
        f"{option}"
    )
    num_bytes = parse_bytes(text, option, advice)
    if num_bytes < MIN_BUDGET_BYTES:
        raise ValueError(f"{option}={text} is {num_bytes} bytes{budget_hint(num_bytes)}: {advice}")
    return num_bytes


def _plan_request(arguments: argparse.Namespace) -> Request:
    from adacc_hf.estimate.adapters import Adapters, Quantization, quantization_of
    from adacc_hf.estimate.fake_model import Workload
    from adacc_hf.estimate.planning import Request
    from adacc_hf.estimate.presets import checked_seq_len, context_length, load_config

    device, sharding = find_device(arguments.device), arguments.sharding
    if arguments.host_bandwidth is not None:
        device = replace(device, host_bandwidth_bytes=arguments.host_bandwidth)
    compact_rank = None
    if arguments.optimizer == COMPACT:
        from adacc_hf.compact import parse_rank

        compact_rank = parse_rank(arguments.rank or "0.25", "--rank")
    config = load_config(arguments.model)
    quantization = quantization_of(config, arguments.model)
    adapters = Adapters(
        rank=arguments.lora_rank,
        targets=None if arguments.lora_targets is None else tuple(arguments.lora_targets),
        dropout=arguments.lora_dropout,
        modules_to_save=None if arguments.modules_to_save is None else tuple(arguments.modules_to_save),
    )
    workload = Workload(
        config=config,
        device=device,
        precision=PRECISIONS[arguments.dtype],
        attention=arguments.attn,
        adapters=None if arguments.peft is None else adapters,
        quantization=quantization or (Quantization() if arguments.load_in_4bit else None),
        compact_rank=compact_rank,
        trace=arguments.trace or device.trace,
        sharding=sharding,
        images=arguments.images or 0,
        # ZeRO 3 has the output layer's weight only during the layer's forward, before the loss is computed.
        adacc=AdaccConfig(
            exact=arguments.exact,
            host_memory=arguments.host_memory,
            head="plain" if sharding.method == "zero3" else "auto",
        ),
    )
    return Request(
        model=arguments.model,
        workload=workload,
        batch_size=arguments.batch_size,
        seq_len=checked_seq_len(arguments.seq_len, config, option="--seq-len"),
        optimizer=arguments.optimizer,
        accumulates=arguments.accumulate,
        budget_bytes=arguments.budget,
        longest_seq_len=context_length(config),
    )


def _plan_sharding(arguments: argparse.Namespace) -> Sharding:
    if arguments.ddp is not None:
        return Sharding(method="ddp", num_devices=arguments.ddp)
    if arguments.fsdp is not None:
        return Sharding(method="fsdp", num_devices=arguments.fsdp)
    if arguments.zero is not None:
        stage, num_devices = arguments.zero
        if stage not in (1, 2, 3):
            raise ValueError(f"--zero {stage} {num_devices}: ZeRO has no stage {stage}, choose 1, 2 or 3")
        return Sharding(method=f"zero{stage}", num_devices=num_devices)
    return Sharding()
