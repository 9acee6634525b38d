"""CompAct (arXiv 2410.15352): linear layers that save a random projection of their input, and train in its subspace.

Usage: `Trainer(optimizer_cls_and_kwargs=(CompactFactory, {"target_modules": "all-linear", "rank": 0.25}))`.

The gradient of a weight, and AdamW's running averages of this gradient, have rank r. Training takes less memory than
under a policy with codecs, but its results differ from AdamW's.
"""

from adacc_hf.compact.optimizer import CompactAdamW, CompactFactory, parse_rank

__all__ = ["CompactAdamW", "CompactFactory", "parse_rank"]
