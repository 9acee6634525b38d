"""How far each codec moves the gradient of a trained model: what tells codecs apart where the loss of a small run does not.

    python -m adacc_hf.eval.gradient_error

A GPT-2 with eager attention is trained on bytes. Then the gradient of some batches is taken with what the blocks save
for backward put through a codec, and compared with the exact gradient by relative L2 error, everything as one vector.
- By codec: every float tensor that a block saves, whatever its size, goes through that one codec in a plain pair of
  saved-tensor hooks. Parameters are left alone and masks kept exactly, as under every scheme.
- "layer-specific" is the paper's scheme (section 3.2) as the executor runs it, by AdaccConfig's default codecs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import Action, Policy, apply_policy, profile_model
from adacc_hf.blocks import find_blocks
from adacc_hf.eval.gradients import Gradients, compute_gradients, relative_error
from adacc_hf.eval.records import Settings, add_settings, markdown_table, save_record
from adacc_hf.eval.workload import Batch, Workload
from adacc_hf.kernels.codecs import Codec, get_codec, list_codecs
from adacc_hf.kernels.outlier_int4 import count_outliers
from adacc_hf.policy import Choice

WORKLOAD = Workload(width=128, layers=4, batch=16, tokens=128, attention="eager")
LEARNING_RATE = 1e-3
LAYER_SPECIFIC = "layer-specific"
NO_OUTLIERS = "outlier_int4 without outliers"

SCALES = ("paper", "signed", "max7", "range15")
GROUP_SIZES = (16, 32, 64, 128)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A codec, or the layer-specific mixture of codecs, with its options; None where there is no such option."""

    name: str
    scale: str | None = None
    group_size: int | None = None
    rounding: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"scale": self.scale, "group_size": self.group_size, "rounding": self.rounding}
        return {name: value for name, value in given.items() if value is not None}


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
    parser.add_argument("--steps", type=int, default=200, help="training steps before the gradients are taken")
    parser.add_argument("--batches", type=int, default=3, help="batches whose errors are averaged (root mean square)")
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
    """A model trained for some steps of AdamW, and its last loss (nan without a step)."""
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
    another_batch = root_mean_square([relative_error(*pair) for pair in zip(exact, exact[1:], strict=False)])
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


def codec_schemes() -> list[Scheme]:
    """Every lossy codec with every combination of the options that it has."""
    lossy = [name for name in list_codecs() if not get_codec(name).lossless]
    schemes = [scheme for name in lossy for scheme in _variants(name, set(get_codec(name).options))]
    plain_groups = [replace(scheme, name=NO_OUTLIERS) for scheme in schemes if scheme.name == "outlier_int4"]
    return schemes + plain_groups


def layer_specific_schemes() -> list[Scheme]:
    """ "range15" is no option of its own: it is what softmax has where the others are not the paper's."""
    return [
        Scheme(name=LAYER_SPECIFIC, scale=scale, group_size=group_size, rounding=rounding)
        for scale, rounding, group_size in product(("paper", "signed", "max7"), ROUNDINGS, GROUP_SIZES)
    ]


def _variants(codec: str, known: set[str]) -> Iterator[Scheme]:
    scales = SCALES if "scale" in known else (None,)
    roundings = ROUNDINGS if "rounding" in known else (None,)
    group_sizes = GROUP_SIZES if "group_size" in known else (None,)
    for scale, rounding, group_size in product(scales, roundings, group_sizes):
        scheme = Scheme(name=codec, scale=scale, group_size=group_size, rounding=rounding)
        if takes(codec, scheme.options):
            yield scheme


def takes(codec: str, options: dict[str, Any]) -> bool:
    """Whether these values are in the codec's range: each has scales of its own."""
    try:
        get_codec(codec, **options)
    except ValueError:
        return False
    return True


def with_options(policy: Policy, scheme: Scheme) -> Policy:
    """`policy` with the scheme's options in the place of each codec's own, where it takes them."""
    plans = tuple(
        replace(plan, choices=tuple((value, _with_options(choice, value, scheme)) for value, choice in plan.choices))
        for plan in policy.plans
    )
    return replace(policy, plans=plans)


def _with_options(choice: Choice, value: int, scheme: Scheme) -> Choice:
    options = dict(choice.options)
    # A seed of its own for each activation, or all would be rounded by the same noise.
    for name, wanted in {**scheme.options, "seed": value}.items():
        if name in options and takes(choice.codec, {name: wanted}):
            options[name] = wanted
    return replace(choice, options=tuple(sorted(options.items())))


class RoundTrips:
    """While entered, what the model's blocks save for backward goes through a scheme's codec and back."""

    def __init__(self, model: PreTrainedModel, scheme: Scheme) -> None:
        self.scheme = scheme
        self.num_tensors = 0
        """How many tensors were encoded."""
        self._in_block = False
        self._parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._mask = get_codec("bitmask")
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._blocks = [block for _, block in find_blocks(model)]
        self._handles: list[Any] = []

    def __enter__(self) -> RoundTrips:
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(lambda *_: self._enter_block(True)))
            self._handles.append(block.register_forward_hook(lambda *_: self._enter_block(False), always_call=True))
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def _enter_block(self, inside: bool) -> None:
        self._in_block = inside

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_parameter = tensor.untyped_storage()._cdata in self._parameters
        if not self._in_block or is_parameter or not tensor.is_floating_point() or self._mask.accepts(tensor):
            return tensor
        codec = self._codec(tensor)
        return codec, codec.encode(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed[0].decode(packed[1])

    def _codec(self, tensor: torch.Tensor) -> Codec:
        self.num_tensors += 1
        if self.scheme.name == NO_OUTLIERS:
            return get_codec("outlier_int4", num_outliers=0, seed=self.num_tensors, **self.scheme.options)
        options = {**self.scheme.options, "seed": self.num_tensors}
        if self.scheme.name == "outlier_int4":
            options["num_outliers"] = count_outliers(tensor)
        return get_codec(self.scheme.name, **options)


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
