"""Callbacks for Transformers' Trainer, and the start-up hook of `adacc run`."""

from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.callbacks.throughput import ThroughputCallback
from adacc_hf.callbacks.trainer_mixin import AdaccTrainerMixin

__all__ = ["AdaccCallback", "AdaccTrainerMixin", "ThroughputCallback"]
