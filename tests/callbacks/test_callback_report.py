"""`AdaccCallback.report()`, and a callback in a notebook's cell."""

from __future__ import annotations

import pytest

from adacc_hf import AdaccCallback
from adacc_hf.adapt.first_steps import COMPILED, COMPILING
from adacc_hf.torch_glue.compat import switch_checkpointing


@pytest.fixture
def run_callback(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback])
    return callback


def test_a_finished_run_shows_its_pictures(run_callback, tmp_path):
    report = run_callback.report()
    names = [figure.file_name for figure in report.figures]
    assert names == [
        "memory_bars.png",
        "policy_map.png",
        "memory.png",
        "frontier.png",
        "first_steps.png",
        "timeline.png",
    ]
    assert report._repr_html_().count("data:image/png;base64,") == len(names)
    text = str(report)
    assert text.startswith("# Adacc report")
    assert run_callback.profile.model_class in text
    report.save(tmp_path / "report")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.md", "report.html", *names}
    assert (tmp_path / "report" / "report.md").read_text() == text


def test_a_callback_shows_its_settings_and_then_its_policy(train, lossless):
    callback = AdaccCallback(**lossless)
    settings = "memory_budget=0.6, actions=('retain', 'recompute')"
    assert repr(callback) == f"AdaccCallback({settings})"
    train([callback])
    assert repr(callback) == f"<AdaccCallback({settings}): {callback.policy.describe()}>"
    html = callback._repr_html_()
    (kind,) = callback.profile.kinds
    assert all(kind.names[value.index] in html for value in kind.activations)
    assert len(html) < 40_000


def test_a_callback_without_a_policy_has_no_report():
    with pytest.raises(ValueError, match=r"no policy to report yet: call report\(\) after the first training step"):
        AdaccCallback().report()


def test_a_policy_without_a_profile_has_no_report(train, run_callback):
    callback = AdaccCallback(policy=run_callback.policy)
    train([callback])
    with pytest.raises(ValueError, match=r"no profile to explain it with: .*adacc report POLICY --profile PROFILE"):
        callback.report()
    assert callback.policy.summary() in repr(callback)
    assert "<table" in callback._repr_html_()


# Importing Inductor raises torch's own deprecation warnings. Tracing a loss after another graph does so, too.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("eager_graphs")
def test_a_compiled_run_has_the_report_of_its_graphs(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback], torch_compile=True, torch_compile_backend="inductor")
    report = callback.report()
    assert report.title == "Adacc report: compiled graphs"
    activities = [record["activity"] for record in callback.first_steps]
    assert activities[0] == COMPILING
    assert activities[-1] == COMPILED
    assert "first_steps.png" in str(report)
    assert callback.policy is None
    assert "no policy yet" not in repr(callback)


def test_a_model_with_checkpointing_of_its_own_is_reported(train, make_model, lossless, caplog):
    """LLaMA-Factory and ms-swift switch checkpointing on in the model, and leave the arguments alone."""
    plain = train(model=make_model())
    model = make_model()
    switch_checkpointing(model, on=True)
    train([AdaccCallback(**lossless)], model=model).assert_equals(plain)
    lines = [record.getMessage() for record in caplog.records if "replaces checkpointing" in record.getMessage()]
    assert len(lines) == 1
    assert "on in the model, though not in the arguments" in lines[0]
    assert "disable_gradient_checkpointing in LLaMA-Factory" in lines[0]
    assert "memory_budget=0.6" in lines[0]
