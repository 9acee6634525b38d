"""The cache of a model's tapes."""

from types import SimpleNamespace

import torch

from adacc_hf.tape.tape_cache import autocast_off


def test_autocast_is_off_for_every_device_that_a_tape_has_values_on():
    """Autocast is off for every device with values on the tape, as a seed of fused attention may lie on the CPU."""
    tape = SimpleNamespace(values=[SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast_off(tape):
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cpu")
