"""CompAct (arXiv 2410.15352): linear layers that save a random projection of their input for backward, and train in it.

`Trainer(optimizer_cls_and_kwargs=(CompactFactory, {"target_modules": "all-linear", "rank": 0.25}))`. The gradient of a
weight and its moments have rank r: less memory than a codec of ours leaves, and another optimization.
"""

from adacc_hf.compact.optimizer import CompactAdamW, CompactFactory, parse_rank

__all__ = ["CompactAdamW", "CompactFactory", "parse_rank"]
