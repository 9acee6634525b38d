import pytest

from adacc_hf import AdaccCallback
from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.torch_glue.compat import CHECKPOINTING


@pytest.mark.parametrize(
    ("method", "has_callback", "overrides"),
    [
        ("none", False, {}),
        ("full", False, {CHECKPOINTING: True}),
        ("quantization", True, {}),
        ("adacc", True, {}),
        ("adacc_no_outlier", True, {}),
        ("compact", False, {}),
        ("adacc_compact", True, {}),
    ],
)
def test_each_method_sets_up_the_trainer(method: str, has_callback: bool, overrides: dict[str, object]):
    callbacks, changed_arguments = method_callbacks(method, "0.25")
    assert [type(callback) for callback in callbacks] == [AdaccCallback] * has_callback
    assert changed_arguments == overrides


def test_the_adacc_methods_differ_in_outliers_alone():
    configs = [method_callbacks(method, "0.25")[0][0].config for method in ("adacc", "adacc_no_outlier")]
    assert [config.outliers for config in configs] == [True, False]
    assert configs[0] == configs[1].with_overrides(outliers=True)
    assert configs[0].memory_budget == 0.25
