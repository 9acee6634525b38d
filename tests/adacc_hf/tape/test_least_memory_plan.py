"""Plans of least memory, for paths without a plan of the policy."""

import pytest
import torch

from adacc_hf.artifacts.policy import RETAIN, Action, Choice
from adacc_hf.run.call import Recording
from adacc_hf.tape.execution_plan import least_memory


class Noisy(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw(x)


@pytest.mark.parametrize(
    ("draw", "is_mask"),
    [
        (lambda x: torch.empty_like(x).bernoulli_(0.9), True),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).div_(0.9), True),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).div_(-0.9), False),
        (lambda x: torch.empty_like(x).bernoulli_(0.9).mul_(2).sub_(1), False),
        (torch.rand_like, False),
    ],
    ids=["bits", "dropout", "negative zeros", "signs", "noise"],
)
def test_masks_that_are_drawn_become_bits_and_other_draws_do_not(draw, is_mask):
    """Random masks become bits, and other random values do not. A CPU's dropout has float masks of 0 and 1/(1-p)."""
    block, x = Noisy(draw), torch.randn(4, 16, requires_grad=True)
    recording = Recording("block", block, (x,), {})
    recording.run(block)
    tape = recording.recorder.tape()
    recording.close()
    (noise,) = [value for value in tape.saved_values() if tape.values[value].source is None]
    expected = Choice(action=Action.COMPRESS, codec="bitmask") if is_mask else RETAIN
    if noise in tape.recomputable:
        pytest.fail("what is drawn must not be replayed")
    assert least_memory(tape, noise) == expected
