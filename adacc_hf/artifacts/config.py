"""The settings of a run, in one frozen record, and the memory budget that they come to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.policy import HEADS, Action
from adacc_hf.artifacts.units import MOST_BYTES, parse_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile

TRACKING_NAMES = ("exponential", "off")
LEAST_BUDGET_BYTES = 64 * 1024
"""The smallest budget in bytes. Nothing trains in less: a smaller number is a fraction or a size without its unit."""


@dataclass(frozen=True, kw_only=True)
class AdaccConfig:
    """How activations may be treated, and within which memory. Raises ValueError for a value outside its range."""

    memory_budget: str | float | int = "auto"
    """What training may use.

    A float in (0, 1]: that fraction of the activation bytes that plain training keeps for backward
    (`Profile.plain_stored_bytes`); 1.0 asks for nothing, small fractions approach full recomputation.
    An int from 65536, or a string such as "20GiB": bytes that the peak of a whole training step keeps to, with
    parameters, gradients and optimizer state. "auto": the same, with the bytes that this process holds and those that
    are free on the device when it profiles, less `memory_margin`. If plain training keeps to the budget, nothing is
    done.
    """
    memory_margin: float = 0.05
    """Fraction, 0 to 0.9, of what the device has for this process that "auto" leaves free, for rounding and all that no
    profile sees. On a GPU another 10 % go to fragments of torch's allocator (`memory.FRAGMENTS`), unless it was told to
    avoid them: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    actions: tuple[str, ...] = ("retain", "compress", "recompute")
    """The actions the solver may choose from. Without "compress" training is bit-equal to plain training; dropout masks
    may be stored as bits in any case, which loses nothing. Where "recompute" is allowed, they may be drawn again, and
    torch's checkpoint may run whole blocks."""
    codecs: tuple[str, ...] | None = None
    """Names of the codecs that may be used (`list_codecs()`); None picks by the kind of layer (paper, section 3.2)."""
    outliers: bool = True
    """Whether outlier channels are kept raw; False is the paper's "Adacc w/o outlier"."""
    compiled_outliers: float = 0.0
    """Share of the channels, 0 to 0.5, that are kept raw in compiled graphs, where shapes are fixed before there is
    data. Each step chooses them anew, which takes two more readings of an activation; 0.01 is what `adacc plan` reckons
    with."""
    zscore_threshold: float = 3.0
    """Channels whose absolute sum lies this many standard deviations above the mean are outliers (equation 1). Large
    values, up to 1e6, find none; 0 takes every channel above the mean."""
    group_size: int = 64
    """Elements that share one scale in group-wise codecs, a power of two from 16 to 1024; small groups are more exact
    and larger in bytes."""
    min_compress_bytes: int = 64 * 1024
    """Activations below this size, 0 to 2^40, are never compressed: a launch costs more than they hold."""
    profile_steps: int = 2
    """Training steps, 1 to 1000, run under torch's checkpoint before a batch is profiled, where the first batch leaves
    blocks out or ranks hold parts of the parameters. Elsewhere there are none: the first batch is profiled before its
    step. A budget in bytes wants at least 2, since the first optimizer step allocates the optimizer's state."""
    reuse_prices: bool = False
    """Whether prices of operators and codecs are taken from the folder that `adacc profiles` shows, where one is
    there for the very same tape, shapes, dtypes, device, versions and settings. Codec errors are then those of the data
    of that time. False measures them anew; they are kept there either way."""
    tracking: str | int = "exponential"
    """When outliers are looked at again (paper, section 3.4): "exponential" at 1, 2, 4, ... steps after the policy was
    set, an int from 1 at every so many steps, "off" never. Each time adds some KiB to the run's history, which every
    checkpoint has: an int is for short runs, or a large one for long ones."""
    tracked_modules: tuple[str, ...] | None = None
    """Patterns (fnmatch) of module paths inside a block whose activations are tracked; None tracks every activation
    that keeps outliers."""
    head: str = "auto"
    """How the output layer and the loss run. "plain": with whole logits. "chunked": logits are made a chunk of tokens
    at a time and never as a whole; loss and gradients are the same but for the order of sums. "auto": chunked where
    that lets the budget be met at all, or faster; considered only where "compress" is allowed, since it is not
    bit-equal. "auto" measures both, so the first steps and the profile need the memory of whole logits; "chunked"
    never makes them."""
    max_error: float | None = None
    """Largest relative L2 round-trip error that a compressed activation may have, and largest relative error of a
    sampled block's gradient. What tracking steps find above it, or to degrade a gradient by that much, is promoted: to
    INT8, or not compressed at all. None does not bound it, 0 allows lossless codecs only; up to 1e6."""
    solver_gap: float = 0.0
    """Part of the overhead, 0 to 1, by which a solution of an integer program may miss the best one; 0 asks for a
    proof, 0.05 stops at five percent. `Policy.facts` has as "gap" what any policy within the budget could still gain on
    the one found, and as "status" whether that is within this: "optimal", else "feasible"."""
    solver_seconds: float = 60.0
    """Longest that one integer program may run, 0.001 to 86400 seconds. A program that ends at this limit makes the
    policy depend on the machine's load; it takes 10 to 30 ms as a rule."""
    guard: bool = True
    """Whether tracking steps measure what compression costs in accuracy, and loss spikes are looked into. Where a
    sampled block's gradient has a relative error above 0.25, the codecs that make it so are found, as few as will do,
    and are not used any more for these activations in all blocks of the kind."""
    guard_blocks: int = 1
    """Blocks per tracking step, 0 to 1000, whose gradient is compared with an uncompressed backward, in turn; each
    costs two forwards and backwards of one block, and for a gradient above its bound up to two more for each activation
    that is compressed. Under a budget in bytes only blocks whose input and gradient can be held within it take turns. 0
    compares none."""
    loss_spike: float = 2.0
    """A logged loss above this many times (1 to 1e6) the median of the last 16, and outside their noise, is a spike.
    Codecs that degrade the gradient of any kind of block then are switched off, as under `guard`. Close to 1 every bad
    batch is one; 1e6 sees only non-finite ones."""
    takeover_steps: int = 1
    """Optimizer steps, 0 to 1000, between a tracking step and the taking over of what was solved from it. 0 waits for
    the solver at once; large values train longer under the old policy."""
    on_over_budget: str = "warn"
    """What is done about batches of a size at which no policy keeps to the budget, before the first of them runs:
    "warn" says so and trains them with the least memory, "error" raises InfeasibleBudgetError."""
    length_buckets: bool | None = None
    """Deprecated, without effect: every size of a batch has a policy of its own."""
    retry_out_of_memory: bool = True
    """Whether a step that ran out of memory is tried once more under a tighter policy, where that is possible."""
    block_classes: tuple[str, ...] | None = None
    """Class names of the modules to treat as blocks; None takes every GradientCheckpointingLayer of Transformers."""

    def __post_init__(self) -> None:
        for name in ("actions", "codecs", "tracked_modules", "block_classes"):
            _store_tuple(self, name)
        check_memory_budget(self.memory_budget)
        _check_actions(self.actions)
        if self.codecs is not None:
            _check_codecs(self.codecs)
        _check_range("memory_margin", self.memory_margin, 0.0, 0.9)
        _check_range("compiled_outliers", self.compiled_outliers, 0.0, 0.5)
        _check_range("zscore_threshold", self.zscore_threshold, 0.0, 1e6)
        _check_group_size(self.group_size)
        _check_integer("min_compress_bytes", self.min_compress_bytes, 0, 2**40)
        _check_integer("profile_steps", self.profile_steps, 1, 1000)
        _check_tracking(self.tracking)
        _check_range("solver_gap", self.solver_gap, 0.0, 1.0)
        _check_range("solver_seconds", self.solver_seconds, 1e-3, 86400.0)
        if self.head not in ("auto", *HEADS):
            raise ValueError(f'head={self.head!r} is unknown: choose from "auto", "plain" and "chunked"')
        if self.on_over_budget not in ("warn", "error"):
            raise ValueError(f'on_over_budget={self.on_over_budget!r} is unknown: choose from "warn" and "error"')
        if self.length_buckets is not None:
            warnings.warn(
                f"length_buckets={self.length_buckets!r} has no effect any more and will go: every size of a batch has "
                f"a policy of its own",
                FutureWarning,
                stacklevel=3,
            )
        if self.max_error is not None:
            _check_range("max_error", self.max_error, 0.0, 1e6)
        for name in ("outliers", "reuse_prices", "guard", "retry_out_of_memory"):
            _check_flag(name, getattr(self, name))
        _check_integer("guard_blocks", self.guard_blocks, 0, 1000)
        _check_range("loss_spike", self.loss_spike, 1.0, 1e6)
        _check_integer("takeover_steps", self.takeover_steps, 0, 1000)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that a policy may choose from."""
        if self.head != "auto":
            return (self.head,)
        return HEADS if "compress" in self.actions and self.max_error != 0 else ("plain",)

    @property
    def parsed_actions(self) -> frozenset[Action]:
        return frozenset(Action(name) for name in self.actions)

    def with_overrides(self, **overrides: Any) -> AdaccConfig:
        """A copy with some fields changed. Raises TypeError for a field that does not exist, with the nearest one."""
        names = [field.name for field in fields(self)]
        unknown = [name for name in overrides if name not in names]
        if unknown:
            near = [known for known in names if unknown[0] in known] or get_close_matches(unknown[0], names)
            allowed = ", ".join(near[:1] or names)
            raise TypeError(f"{unknown[0]}={overrides[unknown[0]]!r} is no setting of AdaccConfig: choose {allowed}")
        return replace(self, **overrides)


def check_memory_budget(budget: str | float | int, least_bytes: int = LEAST_BUDGET_BYTES) -> None:
    """Raise ValueError unless `budget` is one of the four forms that `AdaccConfig.memory_budget` describes.

    A number of bytes must be `least_bytes` or more.
    """
    allowed = 'use "auto", a float in (0, 1], a number of bytes as an int, or a size such as "20GiB"'
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise ValueError(f"memory_budget={budget!r} has type {type(budget).__name__}: {allowed}")
    if isinstance(budget, float) and not 0.0 < budget <= 1.0:
        raise ValueError(f"memory_budget={budget!r} is outside (0, 1]: {allowed}")
    if budget == "auto" or isinstance(budget, float):
        return
    num_bytes = parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget
    if not least_bytes <= num_bytes <= MOST_BYTES:
        meant = what_was_meant(num_bytes)
        raise ValueError(f"memory_budget={budget!r} is outside [{least_bytes}, {MOST_BYTES}] bytes{meant}: {allowed}")


def what_was_meant(num_bytes: int) -> str:
    """Words to add to a message on a budget of `num_bytes` that nothing trains in; none for one that is no such."""
    if not 0 < num_bytes < LEAST_BUDGET_BYTES:
        return ""
    size = f'"{num_bytes}GiB"' if num_bytes <= 1024 else f'"{num_bytes}MiB"'
    fraction = "1.0, all that plain training stores, or " if num_bytes == 1 else ""
    return f", which may have been meant as {fraction}{size}"


@dataclass(frozen=True)
class Budget:
    """A memory budget in bytes."""

    given: str | float | int
    nbytes: int
    of_peak: bool
    """Whether it bounds the peak of the step; else it bounds what is stored for backward."""

    @classmethod
    def resolve(cls, given: str | float | int, profile: Profile, config: AdaccConfig) -> Budget:
        """Raises ValueError unless `given` is one of the forms that `AdaccConfig.memory_budget` describes."""
        check_memory_budget(given, least_bytes=1)  # where nothing fits is said what it may have meant
        if isinstance(given, float):
            # The factor makes up for rounding: (n / plain) * plain must not come out below n.
            return cls(given, int(given * profile.plain_stored_bytes * (1 + 4e-16)), of_peak=False)
        if given == "auto":
            return cls(given, int(profile.available_bytes * (1 - config.memory_margin)), of_peak=True)
        return cls(given, parse_bytes(given, "memory_budget") if isinstance(given, str) else given, of_peak=True)


def _store_tuple(config: AdaccConfig, name: str) -> None:
    """Turn a list given for field `name` into a tuple; one bare string would be taken letter by letter."""
    given: Sequence[str] | None = getattr(config, name)
    if given is None and name != "actions":
        return
    if isinstance(given, str):
        raise ValueError(f"{name}={given!r} must be a tuple of names: write ({given!r},)")
    if not isinstance(given, (Sequence, Set)) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{name}={given!r} must be a tuple of names, each of them a string")
    object.__setattr__(config, name, tuple(given))


def _check_actions(actions: tuple[str, ...]) -> None:
    parsed = [Action.parse(action) for action in actions]
    if Action.RETAIN not in parsed:
        raise ValueError(
            f"actions={actions!r} must contain 'retain': what can be neither compressed nor recomputed has to be kept"
        )


def _check_codecs(codecs: tuple[str, ...]) -> None:
    from adacc_hf.kernels.codecs import list_codecs

    known = list_codecs()
    unknown = [name for name in codecs if name not in known]
    if unknown:
        raise ValueError(f"codecs={unknown!r} are unknown: choose from {', '.join(known)}")


def _check_tracking(tracking: str | int) -> None:
    is_interval = isinstance(tracking, int) and not isinstance(tracking, bool) and tracking >= 1
    if tracking not in TRACKING_NAMES and not is_interval:
        raise ValueError(f'tracking={tracking!r} must be "exponential", "off" or a number of steps of at least 1')


def _check_group_size(size: int) -> None:
    _check_integer("group_size", size, 16, 1024)
    if size & (size - 1):
        raise ValueError(f"group_size={size} is no power of two: choose 16, 32, 64, 128, 256, 512 or 1024")


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} is outside [{low:g}, {high:g}]: choose a number in that range")


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} is not an int in [{low}, {high}]: choose one in that range")


def parse_budget(text: str) -> str | float | int:
    """Return the budget in AdaccConfig's terms: digits are bytes, a decimal is a fraction, all else stays text.

    Example: "0.5" is half of plain's activation bytes, "1" is one byte, "1.0" is all of them.
    """
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
