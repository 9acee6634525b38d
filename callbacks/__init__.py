"""Callbacks for Transformers' Trainer."""

from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.callbacks.throughput import ThroughputCallback

__all__ = ["AdaccCallback", "ThroughputCallback"]
