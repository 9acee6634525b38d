"""Measurements of speed, memory, losses and predictions: the runners of `adacc eval`, and what they share."""

import os

# Default of the GPU allocator in measurements. Methods are compared by the bytes they need, and expandable segments
# avoid the randomness of fragmentation (`adacc_hf.torch_glue.memory.FRAGMENTATION_SHARE`): every block size is a
# multiple of 512 bytes. Set here, because torch reads the variable once, and every measurement imports this package.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
