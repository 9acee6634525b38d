"""The third picture of a report, as PNG bytes: what every peak costs in time, and where other methods stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacc_hf.config import AdaccConfig
from adacc_hf.policy import Action, Policy
from adacc_hf.profile import Profile
from adacc_hf.reports.plots import FONT, matplotlib_module, new_figure, to_png, unit_of
from adacc_hf.solving.frontier import chain, frontiers
from adacc_hf.solving.milp import build_model
from adacc_hf.solving.mixture import overhead_ms
from adacc_hf.solving.naive import NAIVE_CODEC
from adacc_hf.solving.peak import PeakOracle
from adacc_hf.solving.program import SolverLog
from adacc_hf.units import format_bytes

Point = tuple[int, float]
"""Peak of the step in bytes, and ms that it takes longer than plain training."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One method in the picture."""

    name: str
    point: Point
    color: str
    shape: str


def trade_off(profile: Profile) -> list[Point]:
    """The policies of the solver's chain that no other of them beats in both peak and time, by rising peak.

    They may take every action and codec that was priced. Between two of them the solver finds more.
    """
    models = [build_model(kind, AdaccConfig()) for kind in profile.kinds]
    oracle = PeakOracle(profile)
    policies = chain([block.kind for block in profile.blocks], frontiers(SolverLog(), models))
    points = [(oracle.peak_bytes(policy), overhead_ms(policy) + profile.head_overhead_ms) for policy in policies]
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def marks(profile: Profile, policy: Policy) -> list[Mark]:
    """Plain training, torch's checkpoint around every block, quantization of everything, and `policy`."""
    plain, full = Policy.uniform(profile, Action.RETAIN), Policy.uniform(profile, Action.RECOMPUTE)
    # Torch's checkpoint runs the whole forward of a block again, replay only what backward needs.
    forward_ms = sum(profile.kind_of(block).forward_ms for block in profile.blocks)
    codecs = {option.codec for kind in profile.kinds for value in kind.values for option in value.codecs}
    quantized = Policy.uniform(profile, Action.COMPRESS, NAIVE_CODEC if NAIVE_CODEC in codecs else None)
    naive = f"naive quantization ({NAIVE_CODEC})" if NAIVE_CODEC in codecs else "all compressed, codec by layer"
    return [
        Mark(name="plain", point=_point(plain), color="#56606b", shape="s"),
        Mark(name="full checkpointing", point=(full.predicted_peak_bytes, forward_ms), color="#009E73", shape="^"),
        Mark(name=naive, point=_point(quantized), color="#E69F00", shape="D"),
        Mark(name="this policy", point=_point(policy), color="#0072B2", shape="*"),
    ]


def _point(policy: Policy) -> Point:
    return policy.predicted_peak_bytes, policy.predicted_overhead_ms


def draw_frontier(profile: Profile, policy: Policy, budget_bytes: int | None = None) -> bytes:
    """Overhead against the peak of the step: the solver's curve, and the marks of other methods on it."""
    curve, methods = trade_off(profile.with_head(policy.head)), marks(profile, policy)
    scale, unit = unit_of(max(peak for peak, _ in [*curve, *(mark.point for mark in methods)]))
    with matplotlib_module().rc_context(FONT):
        figure = new_figure(4.6)
        axis = figure.subplots()
        _draw_curve(axis, curve, scale)
        for mark in methods:
            (peak, ms), size = mark.point, 15 if mark.shape == "*" else 9
            label = f"{mark.name}: {format_bytes(peak)}, {ms:.2f} ms"
            axis.plot(peak / scale, ms, mark.shape, ms=size, color=mark.color, mec="white", ls="", label=label)
        if budget_bytes is not None:
            label = f"budget, {format_bytes(budget_bytes)}"
            axis.axvline(budget_bytes / scale, color="#CC79A7", lw=1.4, ls="-.", zorder=0, label=label)
        axis.set_xlabel(f"peak of the step [{unit}]")
        axis.set_ylabel("overhead per step [ms]")
        axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])
        if profile.step_ms:
            share = axis.secondary_yaxis(
                "right", functions=(lambda ms: _percent(ms, profile), lambda p: _ms(p, profile))
            )
            share.set_ylabel("% of the profiled step")
        axis.grid(color="#e3e6ea", lw=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return to_png(figure)


def _draw_curve(axis, curve: Sequence[Point], scale: float) -> None:
    """A staircase: what a peak allows, every larger one allows too."""
    peaks, times = [peak / scale for peak, _ in curve], [ms for _, ms in curve]
    axis.plot(peaks, times, color="#0072B2", lw=1.8, ds="steps-post", label="what the solver trades, any action")


def _percent(ms: float, profile: Profile) -> float:
    return 100 * ms / profile.step_ms


def _ms(percent: float, profile: Profile) -> float:
    return percent * profile.step_ms / 100
