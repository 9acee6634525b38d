"""CompAct (arXiv 2410.15352): linear layers that save a random projection of their input, and train in the projection's
subspace.

`Trainer(optimizer_cls_and_kwargs=(CompactFactory, {"target_modules": "all-linear", "rank": 0.25}))`. The gradient of a
weight and its moments have rank r. This takes less memory than a policy with codecs, but training differs from AdamW.
"""

from adacc_hf.compact.optimizer import CompactAdamW, CompactFactory, parse_rank

__all__ = ["CompactAdamW", "CompactFactory", "parse_rank"]
