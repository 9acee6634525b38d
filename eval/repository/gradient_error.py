"""Error that each codec causes in the gradient of a trained model. The loss of a small run hardly distinguishes codecs.

A GPT-2 with eager attention is trained on bytes. Then the gradient of some batches is computed with the saved tensors
of the blocks compressed, and compared with the exact gradient by relative L2 error, with all parameters as one vector.
The decoded saved tensors are compared with the originals in the same way.

Schemes of one codec: plain saved-tensor hooks send every float tensor that a block saves, of any size, through that
codec. Under every scheme parameters stay as they are, and masks are stored exactly. "layer-specific": the paper's
scheme (section 3.2), as a policy that the executor runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise, product
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import Action, Policy, apply_policy, profile_model
from adacc_hf.artifacts.policy import Choice
from adacc_hf.eval.records.command_line import positive_int
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.gradients import Gradients, compute_gradients, relative_error
from adacc_hf.eval.trials.workload import Batch, Workload
from adacc_hf.kernels.codecs import Codec, get_codec, list_codecs
from adacc_hf.kernels.outlier_int4 import count_outliers
from adacc_hf.reports.run_record import Settings, markdown_table
from adacc_hf.run.block_search import find_blocks
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

# Compression schemes, and their application to a model.

LAYER_SPECIFIC = "layer-specific"
NO_OUTLIERS = "outlier_int4 without outliers"

SCALES = ("paper", "signed", "max7", "range15")
GROUP_SIZES = (16, 32, 64, 128)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Codec, or the layer-specific mixture of codecs, with its options. An option that the codec does not have is
    None."""

    name: str
    scale: str | None = None
    group_size: int | None = None
    rounding: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        fields = {"scale": self.scale, "group_size": self.group_size, "rounding": self.rounding}
        return {name: value for name, value in fields.items() if value is not None}


def codec_schemes() -> list[Scheme]:
    """Return every lossy codec with every combination of its options."""
    lossy = [name for name in list_codecs() if not get_codec(name).lossless]
    schemes = [scheme for name in lossy for scheme in _variants(name, set(get_codec(name).options))]
    plain_groups = [replace(scheme, name=NO_OUTLIERS) for scheme in schemes if scheme.name == "outlier_int4"]
    return schemes + plain_groups


def layer_specific_schemes() -> list[Scheme]:
    """Return the layer-specific schemes with every combination of options.

    The scales are the symmetric codecs' scales. If the scale is not the paper's, asymmetric_int4 has "range15".
    """
    return [
        Scheme(name=LAYER_SPECIFIC, scale=scale, group_size=group_size, rounding=rounding)
        for scale, rounding, group_size in product(("paper", "signed", "max7"), ROUNDINGS, GROUP_SIZES)
    ]


def _variants(codec: str, option_names: set[str]) -> Iterator[Scheme]:
    scales = SCALES if "scale" in option_names else (None,)
    roundings = ROUNDINGS if "rounding" in option_names else (None,)
    group_sizes = GROUP_SIZES if "group_size" in option_names else (None,)
    for scale, rounding, group_size in product(scales, roundings, group_sizes):
        scheme = Scheme(name=codec, scale=scale, group_size=group_size, rounding=rounding)
        if accepts_options(codec, scheme.options):
            yield scheme


def accepts_options(codec: str, options: dict[str, Any]) -> bool:
    """Return True if the codec accepts these option values. Each codec has its own scales."""
    try:
        get_codec(codec, **options)
    except ValueError:
        return False
    return True


def with_options(policy: Policy, scheme: Scheme) -> Policy:
    """Return `policy` with the scheme's options for each codec that accepts these options."""
    plans = tuple(
        replace(plan, choices=tuple((value, _with_options(choice, value, scheme)) for value, choice in plan.choices))
        for plan in policy.plans
    )
    return replace(policy, plans=plans)


def _with_options(choice: Choice, value: int, scheme: Scheme) -> Choice:
    options = dict(choice.options)
    # Each activation has a seed of its own. With one seed, all would be rounded by the same noise.
    for name, new_value in {**scheme.options, "seed": value}.items():
        if choice.codec is not None and name in options and accepts_options(choice.codec, {name: new_value}):
            options[name] = new_value
    return replace(choice, options=tuple(sorted(options.items())))


class RoundTrips:
    """Context manager that sends the tensors saved by the model's blocks through a scheme's codec and back."""

    def __init__(self, model: nn.Module, scheme: Scheme) -> None:
        self.scheme = scheme
        self.num_tensors = 0
        """Number of encoded tensors."""
        self._norm = self._difference_norm = 0.0
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

    @property
    def error(self) -> float:
        """Return the relative L2 error of the decoded tensors, all as one vector."""
        return self._difference_norm / self._norm

    def _enter_block(self, inside: bool) -> None:
        self._in_block = inside

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_parameter = tensor.untyped_storage()._cdata in self._parameters
        if not self._in_block or is_parameter or not tensor.is_floating_point() or self._mask.accepts(tensor):
            return tensor
        codec = self._codec(tensor)
        # Detached: a tensor that is saved by the node that created it would never be freed.
        return codec, codec.encode(tensor), tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        codec, payload, original = packed
        restored = codec.decode(payload)
        self._norm = math.hypot(self._norm, float(l2_norm([original])))
        self._difference_norm = math.hypot(self._difference_norm, float(difference_norm([original], [restored])))
        return restored

    def _codec(self, tensor: torch.Tensor) -> Codec:
        self.num_tensors += 1
        name = "outlier_int4" if self.scheme.name == NO_OUTLIERS else self.scheme.name
        options = dict(self.scheme.options)
        if self.scheme.name == "outlier_int4":
            options["num_outliers"] = count_outliers(tensor)
        if "seed" in get_codec(name).options:
            options["seed"] = self.num_tensors  # with one seed, all would be rounded by the same noise
        return get_codec(name, **options)


# Probing of a trained model.

WORKLOAD = Workload(width=128, layers=4, batch=16, tokens=128, attention="eager")
LEARNING_RATE = 1e-3

TRAINING = "gradient, training"
"""Key of the point that all schemes share: the trained model's loss, and the gradient's difference between two
batches."""

Errors = Mapping[Scheme, float]


def add_probing(parser: argparse.ArgumentParser) -> None:
    """Add the options for measuring gradients to the parser."""
    parser.add_argument(
        "--steps", type=positive_int, default=200, help="training steps before the gradients are computed"
    )
    parser.add_argument(
        "--batches", type=positive_int, default=3, help="batches whose errors are averaged (root mean square)"
    )


def probing_info(arguments: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    return {"workload": asdict(workload), "steps": arguments.steps, "batches": arguments.batches}


def measure(ledger: Ledger, workload: Workload) -> None:
    """Measure the point TRAINING, and one point for every scheme."""
    probe = Probe(workload, ledger.run_info["steps"], ledger.run_info["batches"], ledger.settings)
    ledger.measure(TRAINING, lambda: {"final_loss": probe.loss, "another_batch": probe.another_batch()})
    for scheme in tqdm(codec_schemes(), desc="codecs", unit="scheme"):
        ledger.measure(_key(scheme), partial(_point, scheme, probe.codec_errors))
    for scheme in tqdm(layer_specific_schemes(), desc=LAYER_SPECIFIC, unit="scheme"):
        ledger.measure(_key(scheme), partial(_point, scheme, probe.policy_error))


def _point(scheme: Scheme, errors: Callable[[Scheme], Figures]) -> Figures:
    return {**asdict(scheme), **errors(scheme)}


def _key(scheme: Scheme) -> str:
    return "gradient, " + ", ".join([scheme.name, *(f"{name}={value}" for name, value in scheme.options.items())])


class Probe:
    """Trained model, batches and their exact gradients. All are computed on first use, because a resumed run may
    need none of them."""

    def __init__(self, workload: Workload, steps: int, num_batches: int, settings: Settings) -> None:
        self.workload, self.steps, self.num_batches, self.settings = workload, steps, num_batches, settings

    @cached_property
    def _trained_model(self) -> tuple[PreTrainedModel, float, list[Batch]]:
        batches = self.workload.batches(self.settings.device, self.settings.seed)
        model, loss = train(self.workload, batches, self.steps, self.settings)
        return model, loss, list(islice(batches, self.num_batches + 1))

    @property
    def loss(self) -> float:
        return self._trained_model[1]

    @cached_property
    def _exact_gradients(self) -> list[Gradients]:
        model, _, probes = self._trained_model
        return [compute_gradients(model, batch, self.settings.seed) for batch in probes]

    @cached_property
    def _policy(self) -> Policy:
        model, _, probes = self._trained_model
        return uniform_policy(profile_model(model, probes[0]), Action.COMPRESS)

    def another_batch(self) -> float:
        """Return the relative difference between the gradients of two batches."""
        return root_mean_square([relative_error(*pair) for pair in pairwise(self._exact_gradients)])

    def codec_errors(self, scheme: Scheme) -> dict[str, float]:
        """Return the errors of the gradient and of the saved tensors, if one codec encodes all tensors that blocks
        save."""
        with RoundTrips(self._trained_model[0], scheme) as hooks:
            error = self._error()
        assert hooks.num_tensors, f"{scheme} encoded no tensor"
        return {"error": error, "round_trip_error": hooks.error}

    def policy_error(self, scheme: Scheme) -> dict[str, float | None]:
        """Return the error of the gradient under a policy in which each activation has the codec of its layer.

        The error of the saved tensors is None, because a policy gives no access to the decoded tensors.
        """
        with apply_policy(self._trained_model[0], with_options(self._policy, scheme)):
            return {"error": self._error(), "round_trip_error": None}

    def _error(self) -> float:
        """Return the root mean square error over all batches but the last."""
        model, _, probes = self._trained_model
        gradients = [compute_gradients(model, batch, self.settings.seed) for batch in probes[:-1]]
        return root_mean_square([relative_error(*pair) for pair in zip(self._exact_gradients, gradients, strict=False)])


def train(
    workload: Workload, batches: Iterator[Batch], steps: int, settings: Settings
) -> tuple[PreTrainedModel, float]:
    """Train a model for `steps` steps of AdamW. Return the model and its last loss."""
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


def root_mean_square(values: Sequence[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def report_text(ledger: Ledger) -> str:
    """Return the tables of both errors as Markdown."""
    info, training = ledger.run_info, ledger.points[TRAINING]
    rows = [point for key, point in ledger.points.items() if key.startswith("gradient, ") and key != TRAINING]
    schemes = {_scheme(row): row for row in rows}
    errors = {scheme: row["error"] for scheme, row in schemes.items()}
    trips = {s: row["round_trip_error"] for s, row in schemes.items() if row["round_trip_error"] is not None}
    where = f"{Workload(**info['workload'])}, after {info['steps']} steps (loss {training['final_loss']:.3f})"
    parts = [
        f"Relative L2 error of the whole gradient, {where}",
        table_text(errors),
        f"The gradient of another batch: {training['another_batch']:.2f}",
        "Relative L2 error of the tensors that the blocks save, after encoding and decoding:",
        table_text(trips),
    ]
    return "\n\n".join(parts) + "\n"


def _scheme(row: Mapping[str, Any]) -> Scheme:
    return Scheme(**{name: row[name] for name in Scheme.__dataclass_fields__})


def table_text(errors: Errors) -> str:
    """Return one line per codec, scale and rounding, with one column per group size."""
    lines = dict.fromkeys((scheme.name, scheme.scale, scheme.rounding) for scheme in errors)
    columns: dict[int | None, str] = {None: "one per row", **{size: f"groups of {size}" for size in GROUP_SIZES}}
    rows = []
    for name, scale, rounding in lines:
        cells = {
            title: errors.get(Scheme(name=name, scale=scale, group_size=size, rounding=rounding))
            for size, title in columns.items()
        }
        figures = {title: "" if error is None else f"{error:.3f}" for title, error in cells.items()}
        rows.append({"codec": name, "scale": scale or "", "rounding": rounding or "", **figures})
    return markdown_table(rows)
