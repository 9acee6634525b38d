"""Import of DeepSpeed without its kernel for reductions at inference, which takes a minute to compile."""

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
