"""`AdaccCallback.report()`, and a callback in a notebook's cell."""

import pytest

from adacc_hf import AdaccCallback


@pytest.fixture
def run_callback(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback])
    return callback


def test_a_finished_run_shows_its_pictures(run_callback, tmp_path):
    report = run_callback.report()
    names = [figure.file_name for figure in report.figures]
    assert names == ["policy_map.png", "memory.png", "timeline.png"]
    assert report._repr_html_().count("data:image/png;base64,") == len(names)
    text = str(report)
    assert text.startswith("# Adacc report")
    assert run_callback.profile.model_class in text
    report.save(tmp_path / "report")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.md", "report.html", *names}
    assert (tmp_path / "report" / "report.md").read_text() == text


def test_a_callback_without_a_policy_has_no_report():
    with pytest.raises(ValueError, match=r"no policy to report yet: call report\(\) after the first training step"):
        AdaccCallback().report()


def test_a_policy_without_a_profile_has_no_report(train, run_callback):
    callback = AdaccCallback(policy=run_callback.policy)
    train([callback])
    with pytest.raises(ValueError, match=r"no profile to explain it with: .*adacc report POLICY --profile PROFILE"):
        callback.report()
    assert callback.policy.summary() in repr(callback)
    assert "| run as |" in callback._repr_markdown_()


# Importing Inductor raises torch's own deprecation warnings. Tracing a loss after another graph does so, too.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("eager_graphs")
def test_a_compiled_run_has_the_report_of_its_graphs(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback], torch_compile=True, torch_compile_backend="inductor")
    report = callback.report()
    assert report.title == "Adacc report: compiled graphs"
    assert callback.policy is None
    assert "no policy yet" not in repr(callback)
