"""Train Hugging Face language models under a memory budget.

Importing this package starts no CUDA and loads neither triton, highspy nor lm_eval: names are resolved on first use.
"""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "callbacks")) and _os.path.isfile(_os.path.join(_root, "setup.cfg")):
    # A source checkout keeps callbacks/, kernels/ and eval/ beside this folder; a wheel has them inside.
    __path__.append(_root)

if TYPE_CHECKING:
    from adacc_hf.callbacks.adacc import AdaccCallback
    from adacc_hf.callbacks.throughput import ThroughputCallback
    from adacc_hf.config import AdaccConfig
    from adacc_hf.errors import (
        AdaccError,
        CompiledBlockError,
        InfeasibleBudgetError,
        NestedHooksError,
        NoBlocksError,
        OptimizerStateError,
        PolicyMismatchError,
        TapeMismatchError,
    )
    from adacc_hf.executor import apply_policy
    from adacc_hf.policy import Action, Policy
    from adacc_hf.profile import Profile
    from adacc_hf.profiler import profile_model
    from adacc_hf.rectifier import Rectifier
    from adacc_hf.solver import solve_policy

_EXPORTS = {
    "AdaccCallback": "adacc_hf.callbacks.adacc",
    "ThroughputCallback": "adacc_hf.callbacks.throughput",
    "AdaccConfig": "adacc_hf.config",
    "AdaccError": "adacc_hf.errors",
    "CompiledBlockError": "adacc_hf.errors",
    "InfeasibleBudgetError": "adacc_hf.errors",
    "NestedHooksError": "adacc_hf.errors",
    "NoBlocksError": "adacc_hf.errors",
    "OptimizerStateError": "adacc_hf.errors",
    "PolicyMismatchError": "adacc_hf.errors",
    "TapeMismatchError": "adacc_hf.errors",
    "apply_policy": "adacc_hf.executor",
    "Action": "adacc_hf.policy",
    "Policy": "adacc_hf.policy",
    "Profile": "adacc_hf.profile",
    "profile_model": "adacc_hf.profiler",
    "Rectifier": "adacc_hf.rectifier",
    "solve_policy": "adacc_hf.solver",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'adacc_hf' has no attribute {name!r}")
    value = getattr(_import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
