"""RunProfiler: which micro-batch of a step is recorded, and when recording waits."""

import pytest
from torch.profiler import ProfilerActivity, profile

from adacc_hf import AdaccConfig
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.adapt.training_loop import TrainingLoop


@pytest.mark.parametrize(("num_micro", "turn"), [(1, 1), (2, 2), (4, 2)])
def test_the_first_micro_batch_that_finds_gradients_is_recorded(make_model, num_micro, turn):
    profiler = RunProfiler(AdaccConfig(), TrainingLoop(num_micro))
    model = make_model()
    assert [number for number in range(1, num_micro + 1) if profiler.is_turn(number, model)] == [turn]


def test_recording_waits_for_another_profiler_and_warns_once(make_model, caplog):
    profiler, model = RunProfiler(AdaccConfig(), TrainingLoop()), make_model()
    assert not profiler.must_wait(model)
    with profile(activities=[ProfilerActivity.CPU]):
        assert [profiler.must_wait(model) for _ in range(2)] == [True, True]
    assert not profiler.must_wait(model)
    assert caplog.text.count("a torch profiler is active") == 1
