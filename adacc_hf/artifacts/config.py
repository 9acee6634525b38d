"""Settings of a run as one frozen record, and the memory budget in bytes that follows from the settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from adacc_hf.artifacts.budget_values import HOST_SHARE, check_host_memory, check_memory_budget, read_fraction
from adacc_hf.artifacts.policy import HEADS, Action
from adacc_hf.artifacts.setting_checks import check_flag, check_integer, check_range, describe_value
from adacc_hf.artifacts.tiles import TILE, most_tiles
from adacc_hf.artifacts.units import parse_bytes
from adacc_hf.kernels._host_payloads import is_on_host

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile

T = TypeVar("T")

_ACTION_NAMES = ", ".join(repr(name) for name in (*(action.value for action in Action), TILE))
_OTHER_NAMES = {
    "lossless": "exact=True",
    "offload": 'host_memory="64GiB", or another limit',
    "cpu_offload": 'host_memory="64GiB", or another limit',
    "guard": 'tracking="off"',
}
"""Settings to suggest for names that other packages or earlier versions use."""
_EXAMPLES = {
    "actions": ("retain", "recompute"),
    "block_classes": ("GPT2Block",),
}
"""Values to suggest for settings that are tuples of names."""
_EXACT = (Action.RETAIN.value, Action.RECOMPUTE.value)
TRACKING_NAMES = ("exponential", "off")
REACTIONS = ("warn", "error")
"""Values of the settings `on_over_budget` and `on_uncovered`."""


def _named_settings(config_class: type[T]) -> type[T]:
    """Make the constructor of `config_class` raise a helpful TypeError for positional or unknown settings."""
    init = config_class.__init__

    @wraps(init)
    def checked_init(self: T, *args: Any, **settings: Any) -> None:
        if args:
            meant = "**settings" if isinstance(args[0], Mapping) else f"memory_budget={args[0]!r}"
            of = "for a dict of settings" if isinstance(args[0], Mapping) else "if this is the budget"
            raise TypeError(f"AdaccConfig({args[0]!r}): settings are given by name: write AdaccConfig({meant}) {of}")
        _refuse_unknown(settings)
        init(self, **settings)

    config_class.__init__ = checked_init  # type: ignore[assignment, method-assign]
    return config_class


@_named_settings
@dataclass(frozen=True, kw_only=True)
class AdaccConfig:
    """Settings of a run: the memory budget, and the allowed actions on activations.

    Raises ValueError for a value outside its range, and TypeError, which names the closest setting, for an unknown
    setting.
    """

    memory_budget: str | float | int = "auto"
    """Memory budget of training.

    A float in (0, 1], or its text, such as "0.5": limit on the bytes stored for backward, as a fraction of plain
    training's (`Profile.plain_stored_bytes`). 1.0 is plain training, small fractions approach full recomputation.
    An int from 65536, or a string such as "20GiB": limit on the peak of a whole training step in bytes, with
    parameters, gradients and optimizer state. "auto": limit on the peak, equal to the bytes that this process uses plus
    the bytes free on the device at the time of profiling, less `memory_margin`. If plain training fits the budget, the
    blocks are not changed.
    """
    memory_margin: float = 0.05
    """Fraction, 0 to 0.9, of the available device memory that "auto" leaves free, for rounding and allocations that a
    profile does not measure. On a GPU, another 10 % is reserved for fragmentation of torch's allocator
    (`memory.FRAGMENTATION_SHARE`), unless PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids fragmentation. On a
    CPU, 25 % of the free memory is reserved for the heap (`memory.HEAP_SHARE`)."""
    exact: bool = False
    """True for losses, gradients and weights that are bit-equal to plain training's: "compress" and "tile" are removed
    from `actions`, and lossy codecs and a chunked head raise ValueError."""
    actions: tuple[str, ...] = ("retain", "compress", "recompute", "tile")
    """Actions that the solver may choose. Most users need `exact` only.
    Dropout masks may always be stored as bits, which is lossless. With "recompute", dropout masks may also be drawn
    again from the generator's state, and torch's checkpoint may run whole blocks. With "tile", a part of a block that
    computes each token independently, such as an MLP, may run on a few tokens at a time, if the micro-batch has 4096
    tokens or more. Gradients then differ from plain training's by the order of sums."""
    codecs: tuple[str, ...] | None = None
    """Names of the allowed codecs (`list_codecs()`). None selects codecs by the kind of layer (paper, section 3.2)."""
    host_memory: str | float | int | None = None
    """Limit on the bytes that this process stores in the host's memory, as payloads of activations on a GPU.

    An int from 65536, or a string such as "64GiB": a size. A float in (0, 0.8], or its text: a fraction of the memory
    that is free at the time of profiling, divided by the number of ranks on the host. A size is also limited to the
    fraction 0.8. None, the default, stores nothing in host memory, because other processes may need this memory, it
    cannot be swapped out while it is pinned, and copies have not been timed on a GPU yet. Moving a tensor is lossless,
    so it is allowed for all values of `actions` and `codecs`. Has no effect on a CPU, and on GPUs that share the host's
    memory.
    """
    outliers: bool = True
    """True to store outlier channels (channels with unusually large values) uncompressed. False is only for the paper's
    comparison with "Adacc w/o outlier"."""
    min_compress_bytes: int = 64 * 1024
    """Size in bytes, 0 to 2^40, below which activations are never compressed, because a kernel launch costs more than
    the freed memory is worth."""
    profile_steps: int = 2
    """Training steps, 1 to 1000, that may run under torch's checkpoint before the first policy if `on_uncovered` is
    "error". Usually there is one, which is profiled. There are more if the model skips blocks on the first batches, or
    if a torch profiler is active on a CPU."""
    tracking: str | int = "exponential"
    """Schedule of tracking steps, which measure outliers again (paper, section 3.4). "exponential" tracks 1, 2, 4, ...
    steps after the policy was set. An int n of 1 or more tracks every n steps. A tracking step also compares the
    gradient of one block with the exact one, and a step after a spike of the loss one block of every kind (blocks with
    the same operators). If a relative error is above 0.25, as few codecs as possible are switched off, for the same
    activations in all blocks of this kind. "off" measures nothing, also after spikes. Each tracking step adds some KiB
    to the run's history, which every checkpoint contains. Therefore use a small int for short runs only."""
    head: str = "auto"
    """Head: how the output layer and the loss run. "plain": with whole logits. "chunked": logits are computed for one
    chunk of tokens at a time, and loss and gradients differ only by the order of sums. "auto": chunked if the budget
    cannot be met otherwise, or if chunked is faster. "auto" considers the chunked head only if "compress" is allowed,
    because the chunked head is not bit-equal. "auto" trains the first step with the chunked head.
    "chunked" never allocates whole logits."""
    max_error: float | None = None
    """Largest relative L2 round-trip error of a compressed activation, and largest relative error of a sampled block's
    gradient, up to 1e6. If a tracking step measures a larger error, the activation is promoted to INT8, or not
    compressed any more. With None, only the fixed limit of 25 % for gradients applies. 0 allows
    lossless codecs only."""
    on_over_budget: str = "warn"
    """Reaction to a batch size at which no policy fits the budget, before the first batch of that size runs. "warn"
    logs a warning and trains with the minimum memory, "error" raises InfeasibleBudgetError."""
    on_uncovered: str = "warn"
    """Reaction to blocks that train without a policy for their activations: blocks that can only run plainly or under
    torch's checkpoint, and calls that do not follow the policy. "warn" trains these blocks anyway, and reports them
    when training ends. "error" raises UncoveredBlockError, with the blocks and the reason, as soon as this is known:
    after the first step, or in the micro-batch. Up to `profile_steps` steps before the first policy are allowed. If a
    policy is passed in without its profile, only calls that do not follow the policy are known."""
    retry_out_of_memory: bool = True
    """True to run a step that ran out of memory once more, under a policy that needs less memory, if the step can be
    repeated."""
    block_classes: tuple[str, ...] | None = None
    """Class names of the modules to treat as blocks. None selects every GradientCheckpointingLayer of Transformers."""

    def __post_init__(self) -> None:
        for name in ("actions", "codecs", "block_classes"):
            _store_tuple(self, name)
        for name in ("memory_budget", "host_memory"):
            object.__setattr__(self, name, read_fraction(getattr(self, name)))
        check_memory_budget(self.memory_budget)
        _check_actions(self.actions)
        if self.codecs is not None:
            _check_codecs(self.codecs)
        check_flag("exact", self.exact)
        if self.exact:
            _remove_inexact(self)
        check_host_memory(self.host_memory)
        check_range("memory_margin", self.memory_margin, 0.0, 0.9)
        check_integer("min_compress_bytes", self.min_compress_bytes, 0, 2**40)
        check_integer("profile_steps", self.profile_steps, 1, 1000)
        _check_tracking(self.tracking)
        if self.head not in ("auto", *HEADS):
            raise ValueError(f'head={self.head!r} is unknown: choose from "auto", "plain" and "chunked"')
        for name in ("on_over_budget", "on_uncovered"):
            if getattr(self, name) not in REACTIONS:
                raise ValueError(f'{name}={getattr(self, name)!r} is unknown: choose from "warn" and "error"')
        if self.max_error is not None:
            check_range("max_error", self.max_error, 0.0, 1e6)
        for name in ("outliers", "retry_out_of_memory"):
            check_flag(name, getattr(self, name))

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        settings = ((field, getattr(self, field.name)) for field in fields(self))
        changed = {field.name: value for field, value in settings if value != field.default}
        if self.exact and self.actions == _EXACT:  # as `exact` implies
            del changed["actions"]
        return changed

    def describe_changes(self) -> str:
        """Return the settings that differ from their defaults as keyword arguments, such as "memory_budget=0.5"."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed_settings.items())

    def describe_actions(self) -> str:
        """Return the setting that limits the actions, such as "exact=True", for messages."""
        return "exact=True" if self.exact else f"actions={self.actions!r}"

    def __repr__(self) -> str:
        return f"AdaccConfig({self.describe_changes()})"

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads (ways to run the output layer and the loss) that a policy may choose."""
        if self.head != "auto":
            return (self.head,)
        return HEADS if "compress" in self.actions and self.max_error != 0 else ("plain",)

    @property
    def allows_tiles(self) -> bool:
        """True if modules that compute each token independently may run in tiles, on a few tokens at a time. Like a
        chunked head, tiles change the order of sums."""
        return TILE in self.actions and self.max_error != 0

    def for_rows(self, num_rows: int) -> AdaccConfig:
        """Return the config for a micro-batch of `num_rows` tokens: without "tile" if they are too few."""
        if TILE not in self.actions or most_tiles(num_rows):
            return self
        return replace(self, actions=tuple(name for name in self.actions if name != TILE))

    def host_limit(self, free_bytes: int) -> int:
        """Return the maximum bytes of payloads in host memory, of which `free_bytes` are free for this process."""
        if self.host_memory is None:
            return 0
        setting = self.host_memory
        if isinstance(setting, float):
            return int(setting * free_bytes)
        size = parse_bytes(setting, "host_memory") if isinstance(setting, str) else setting
        return min(size, int(HOST_SHARE * free_bytes))

    @property
    def parsed_actions(self) -> frozenset[Action]:
        """The setting `actions` as `Action` members, without "tile", which is not an action on an activation."""
        return frozenset(Action(name) for name in self.actions if name != TILE)

    def with_overrides(self, **overrides: Any) -> AdaccConfig:
        """Return a copy with some fields changed. Raises TypeError, which names the closest setting, for an unknown
        field."""
        return type(self)(**self.changed_settings | overrides)


def _refuse_unknown(settings: dict[str, Any]) -> None:
    names = [field.name for field in fields(AdaccConfig)]
    unknown = next((name for name in settings if name not in names), None)
    if unknown is not None:
        matches = [name for name in names if unknown in name] or get_close_matches(unknown.lower(), names)
        allowed = _OTHER_NAMES.get(unknown, ", ".join(matches[:1] or names))
        raise TypeError(f"{unknown}={settings[unknown]!r} is not a setting of AdaccConfig: choose {allowed}")


@dataclass(frozen=True)
class Budget:
    """A memory budget in bytes."""

    setting: str | float | int
    """Value of `memory_budget`."""
    nbytes: int
    limits_peak: bool
    """True if the budget limits the peak of a training step, False if it limits the bytes stored for backward."""

    def needed_bytes(self, policy: Policy) -> int:
        """Return the predicted bytes of `policy` to compare with the budget."""
        return policy.predicted_peak_bytes if self.limits_peak else policy.predicted_stored_bytes

    @classmethod
    def resolve(cls, setting: str | float | int, profile: Profile, config: AdaccConfig) -> Budget:
        """Return the budget in bytes for `profile`.

        Raises ValueError unless `setting` has one of the forms of `AdaccConfig.memory_budget`.
        """
        setting = read_fraction(setting)
        check_memory_budget(setting, min_bytes=1)  # the solver refuses budgets below MIN_BUDGET_BYTES, with a hint
        if isinstance(setting, float):
            # The factor compensates for rounding: (n / plain) * plain must not be less than n.
            return cls(setting, int(setting * profile.plain_stored_bytes * (1 + 4e-16)), limits_peak=False)
        if setting == "auto":
            return cls(setting, int(profile.available_bytes * (1 - config.memory_margin)), limits_peak=True)
        num_bytes = parse_bytes(setting, "memory_budget") if isinstance(setting, str) else setting
        return cls(setting, num_bytes, limits_peak=True)


def _store_tuple(config: AdaccConfig, name: str) -> None:
    """Convert the list in field `name` to a tuple. Raise ValueError for a string, which would be split into letters."""
    names: Sequence[str] | None = getattr(config, name)
    if names is None and name != "actions":
        return
    if isinstance(names, str):
        parts = tuple(part for part in re.split(r"[\s,;]+", names) if part)
        if name == "codecs":
            _check_codecs(parts)
        named = _with_retain(parts) if name == "actions" else parts
        choice = f", with names from {_ACTION_NAMES}" if name == "actions" else ""
        raise ValueError(f"{name}={names!r} must be a tuple of names: write {named!r}{choice}")
    if not isinstance(names, (Sequence, Set)) or not all(isinstance(item, str) for item in names):
        raise ValueError(
            f"{describe_value(name, names)}: it must be a tuple of names, each of them a string, such as "
            f"{_EXAMPLES.get(name, 'those of list_codecs()')}"
        )
    object.__setattr__(config, name, tuple(names))


def _check_actions(actions: tuple[str, ...]) -> None:
    allowed = [*(action.value for action in Action), TILE]
    unknown = next((name for name in actions if name not in allowed), None)
    if unknown is not None:
        closest = get_close_matches(unknown.lower(), allowed, n=1)
        hint = f", which may have been meant as {closest[0]!r}" if closest else ""
        raise ValueError(f"actions={actions!r} contains {unknown!r}{hint}: choose from {_ACTION_NAMES}")
    if Action.RETAIN.value not in actions:
        raise ValueError(
            f"actions={actions!r} must contain 'retain', because some activations can be neither compressed nor "
            f"recomputed: write {_with_retain(actions)!r}"
        )


def _remove_inexact(config: AdaccConfig) -> None:
    """Remove "compress" and "tile" from the default actions. Raise ValueError if a setting names an inexact choice."""
    from adacc_hf.kernels.codecs import codec_type

    actions = tuple(name for name in config.actions if name in _EXACT)
    lossy = tuple(name for name in config.codecs or () if not codec_type(name).lossless)
    for setting, is_inexact, allowed in (
        ("actions", config.actions not in (AdaccConfig.actions, actions), "'retain' and 'recompute'"),
        ("codecs", bool(lossy), "lossless codecs of `adacc codecs`"),
        ("head", config.head == "chunked", "'auto' and 'plain'"),
    ):
        if is_inexact:
            raise ValueError(
                f"exact=True allows {allowed} only, and {setting}={getattr(config, setting)!r} is not bit-equal to "
                f"plain training: leave out {setting}, or exact"
            )
    object.__setattr__(config, "actions", actions)


def _with_retain(names: Iterable[str]) -> tuple[str, ...]:
    """Return a valid setting `actions` to suggest in an error message: those closest to `names`, and "retain". If none
    is close, suggest exact training."""
    allowed = [*(action.value for action in Action), TILE]
    closest = {match for name in names for match in get_close_matches(name.lower(), allowed, n=1)}
    if not closest:
        return Action.RETAIN.value, Action.RECOMPUTE.value
    return tuple(name for name in allowed if name in closest or name == Action.RETAIN.value)


def _check_codecs(codecs: tuple[str, ...]) -> None:
    from adacc_hf.kernels.codecs import list_codecs

    allowed = list_codecs()
    unknown = [name for name in codecs if name not in allowed]
    if unknown:
        hint = ". host_memory=... moves payloads to host memory" if any(map(is_on_host, unknown)) else ""
        raise ValueError(f"codecs={unknown!r} are unknown: choose from {', '.join(allowed)}{hint}")


def _check_tracking(tracking: str | int) -> None:
    is_interval = isinstance(tracking, int) and not isinstance(tracking, bool) and tracking >= 1
    if tracking not in TRACKING_NAMES and not is_interval:
        hint = ', write "off" in quotes in YAML' if tracking is False else ""
        raise ValueError(
            f'tracking={tracking!r} must be "exponential" or "off"{hint}, or a number of steps of at least 1, as an int'
        )
