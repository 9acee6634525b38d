"""How far each codec moves the gradient of a trained model. The loss of a small run hardly tells them apart.

    python -m adacc_hf.eval.gradient_error

A GPT-2 with eager attention is trained on bytes. Then the gradient of some batches is taken with what the blocks save
for backward compressed, and compared with the exact gradient by relative L2 error, everything as one vector.
`codec_schemes` says what is compressed under each scheme.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice, pairwise

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import Action, Policy, apply_policy, profile_model
from adacc_hf.eval.codec_schemes import (
    GROUP_SIZES,
    LAYER_SPECIFIC,
    NO_OUTLIERS,
    RoundTrips,
    Scheme,
    codec_schemes,
    layer_specific_schemes,
    with_options,
)
from adacc_hf.eval.gradients import Gradients, compute_gradients, relative_error
from adacc_hf.eval.records import Settings, add_settings, markdown_table, positive_int, save_record
from adacc_hf.eval.workload import Batch, Workload

WORKLOAD = Workload(width=128, layers=4, batch=16, tokens=128, attention="eager")
LEARNING_RATE = 1e-3

# fmt: off
PROTOTYPE_ERRORS = {
    Scheme(name="token_int4", scale="paper", rounding="nearest"): 0.176,
    Scheme(name=NO_OUTLIERS, scale="paper", group_size=64, rounding="nearest"): 0.142,
    Scheme(name=NO_OUTLIERS, scale="signed", group_size=16, rounding="nearest"): 0.071,
    Scheme(name=NO_OUTLIERS, scale="signed", group_size=32, rounding="nearest"): 0.096,
    Scheme(name=NO_OUTLIERS, scale="signed", group_size=64, rounding="nearest"): 0.121,
    Scheme(name=NO_OUTLIERS, scale="signed", group_size=128, rounding="nearest"): 0.154,
    Scheme(name="asymmetric_int4", scale="range15", group_size=32, rounding="nearest"): 0.078,
    Scheme(name="asymmetric_int4", scale="range15", group_size=64, rounding="nearest"): 0.088,
    Scheme(name="int8", group_size=128, rounding="nearest"): 0.013,
    Scheme(name=LAYER_SPECIFIC, scale="paper", group_size=64, rounding="nearest"): 0.093,
    Scheme(name=LAYER_SPECIFIC, scale="signed", group_size=64, rounding="nearest"): 0.083,
}
"""What was measured before this package was written, on another GPT-2 of 4 layers after 200 steps."""
# fmt: on


def main(argv: Sequence[str] | None = None, workload: Workload = WORKLOAD) -> int:
    """Train, measure every scheme, print the tables and save the record."""
    parser = argparse.ArgumentParser(prog="adacc_hf.eval.gradient_error", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive_int, default=200, help="training steps before the gradients are taken")
    parser.add_argument(
        "--batches", type=positive_int, default=3, help="batches whose errors are averaged (root mean square)"
    )
    add_settings(parser, "gradient_error")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    batches = workload.batches(settings.device, settings.seed)
    model, loss = train(workload, batches, arguments.steps, settings)
    probes = list(islice(batches, arguments.batches + 1))
    errors, another_batch = measure(model, probes, settings.seed)
    run_info = {"workload": asdict(workload), "steps": arguments.steps, "batches": arguments.batches}
    rows = [{**asdict(scheme), "error": error} for scheme, error in errors.items()]
    save_record(settings, run_info, {"final_loss": loss, "another_batch": another_batch, "errors": rows})
    print(f"Relative L2 error of the whole gradient, {workload}, after {arguments.steps} steps (loss {loss:.3f})\n")
    print(f"{table_text(errors)}\n\n{comparison_text(errors)}\n\nThe gradient of another batch: {another_batch:.2f}")
    print(f"\nsaved as {settings.output}")
    return 0


def train(
    workload: Workload, batches: Iterator[Batch], steps: int, settings: Settings
) -> tuple[PreTrainedModel, float]:
    """A model trained for some steps of AdamW, and its last loss."""
    model = workload.model(settings.device, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(settings.seed)
    loss = torch.tensor(float("nan"))
    for batch in tqdm(islice(batches, steps), total=steps, desc="training", unit="step", leave=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, loss.item()


def measure(model: PreTrainedModel, probes: Sequence[Batch], seed: int) -> tuple[dict[Scheme, float], float]:
    """The error of every scheme, and that of taking another batch: root mean squares over all probes but the last."""
    exact = [compute_gradients(model, batch, seed) for batch in probes]
    another_batch = root_mean_square([relative_error(*pair) for pair in pairwise(exact)])
    errors = {}
    for scheme in tqdm(codec_schemes(), desc="codecs", unit="scheme", leave=False):
        with RoundTrips(model, scheme) as hooks:
            errors[scheme] = _error(model, probes, exact, seed)
            assert hooks.num_tensors, f"{scheme} met no tensor to encode"
    profile = profile_model(model, probes[0])
    policy = Policy.uniform(profile, Action.COMPRESS)
    with apply_policy(model, policy) as handle:
        for scheme in tqdm(layer_specific_schemes(), desc=LAYER_SPECIFIC, unit="scheme", leave=False):
            handle.replace(with_options(policy, scheme))
            errors[scheme] = _error(model, probes, exact, seed)
    return errors, another_batch


def _error(model: PreTrainedModel, probes: Sequence[Batch], exact: Sequence[Gradients], seed: int) -> float:
    pairs = zip(probes[:-1], exact, strict=False)
    return root_mean_square([relative_error(expected, compute_gradients(model, b, seed)) for b, expected in pairs])


def root_mean_square(values: Sequence[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def table_text(errors: dict[Scheme, float]) -> str:
    """One line per codec, scale and rounding; one column per group size."""
    lines = dict.fromkeys((scheme.name, scheme.scale, scheme.rounding) for scheme in errors)
    columns = {None: "one per row", **{size: f"groups of {size}" for size in GROUP_SIZES}}
    rows = []
    for name, scale, rounding in lines:
        cells = {
            title: errors.get(Scheme(name=name, scale=scale, group_size=size, rounding=rounding))
            for size, title in columns.items()
        }
        figures = {title: "" if error is None else f"{error:.3f}" for title, error in cells.items()}
        rows.append({"codec": name, "scale": scale or "", "rounding": rounding or "", **figures})
    return markdown_table(rows)


def comparison_text(errors: dict[Scheme, float]) -> str:
    """What was measured here beside what a prototype had."""
    rows = [
        {
            "setting": ", ".join([scheme.name, *(str(value) for value in scheme.options.values())]),
            "here": f"{errors[scheme]:.3f}",
            "prototype": f"{expected:.3f}",
        }
        for scheme, expected in PROTOTYPE_ERRORS.items()
    ]
    return markdown_table(rows)


if __name__ == "__main__":
    sys.exit(main())
