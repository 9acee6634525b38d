"""Plans of earlier runs, beside Inductor's code: prices are measured, and a plan made anew would miss that code."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from adacc_hf.partitioner.region import CompiledPolicy, RegionPlan


class PlanStore:
    """One file per region and way of deciding about it; it goes when torch's caches are deleted.

    Nothing is kept or found where Inductor's cache of graphs is off.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """`folder` is by default in torch's cache directory."""
        self._folder = Path(cache_dir()) / "adacc" if folder is None else Path(folder)

    def load(self, decider: str, digest: str) -> RegionPlan | None:
        """The plan that `decider`, the partitioner's uuid, made for the graph of that digest; None if there is none."""
        path = self._path(decider, digest)
        return CompiledPolicy.load(path).regions[0] if path.is_file() and _is_on() else None

    def save(self, decider: str, plan: RegionPlan) -> None:
        if _is_on():
            CompiledPolicy(share=None, regions=(plan,)).save(self._path(decider, plan.digest))

    def _path(self, decider: str, digest: str) -> Path:
        return self._folder / f"{digest}-{hashlib.sha256(decider.encode()).hexdigest()[:16]}.json"


def _is_on() -> bool:
    return inductor.fx_graph_cache and not inductor.force_disable_caches
