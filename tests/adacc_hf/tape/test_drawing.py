"""Which operators draw random numbers; how recorders tell is in test_recorder.py."""

import pytest
import torch

from adacc_hf.tape.recorder import RngUse


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_draw_that_reads_no_tensor_is_looked_for_on_the_device_it_names(monkeypatch, device):
    class Generator:
        offset = 0

        def initial_seed(self):
            return 1

        def get_offset(self):
            return self.offset

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    drawings = [RngUse(torch.ops.aten.rand.default, ([4],), {"device": torch.device(device)}) for _ in range(2)]
    assert not drawings[0].happened()
    generator.offset += 4
    assert drawings[1].happened()
