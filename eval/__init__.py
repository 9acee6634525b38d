"""Everything that measures: speed, memory, the error of gradients, the solver. Each module runs with `python -m`."""

import os

# How a GPU's memory is given out in measurements, unless the user says otherwise: methods are to be compared by what
# they need, not by how their blocks happen to fall apart (`adacc_hf.torch_glue.memory.FRAGMENTS`), and a block of any
# size is a multiple of 512 bytes then. Here, since torch looks for it once, and all that measures comes by.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
