"""AdaccCallback: sources of its policy, log entries and reports, settings that it refuses, and mistakes of users."""

import pytest

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def profile(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback], max_steps=2)
    return callback.profile


def test_settings_override_the_config(lossless):
    config = AdaccConfig(memory_budget="1GiB", tracking=32)
    assert AdaccCallback(config, tracking=16).config == AdaccConfig(memory_budget="1GiB", tracking=16)
    with pytest.raises(TypeError, match="memory_limit"):
        AdaccCallback(memory_limit=3)


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_policy_file_is_followed(train, profile, tmp_path, kind):
    policy = random_policy(profile, seed=0)
    policy.save(tmp_path / "policy.json")
    callback = AdaccCallback(policy=kind(tmp_path / "policy.json"))
    train([callback]).assert_equals(train())
    assert callback.policy == policy


def test_a_missing_policy_file_is_named(train, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json does not exist"):
        train([AdaccCallback(policy=tmp_path / "absent.json")])


def test_a_function_of_the_profile_makes_the_policy(train):
    profiles = []

    def recompute_all(profile):
        profiles.append(profile)
        return uniform_policy(profile, "recompute")

    callback = AdaccCallback(policy=recompute_all)
    train([callback])
    assert profiles == [callback.profile]
    assert callback.policy == uniform_policy(callback.profile, "recompute")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 0.5}, r"config=0\.5 is not an AdaccConfig: give settings by name"),
        ({"config": {"memory_budget": 0.5}}, "config={'memory_budget': 0.5} is not an AdaccConfig"),
        ({"config": AdaccConfig}, "config=<class .*> is not an AdaccConfig"),
        ({"memory_buget": 0.5}, r"memory_buget=0\.5 is not a setting of AdaccConfig: choose memory_budget"),
        ({"policy": 5}, "policy=5 has type int: give a Policy, the path of a file"),
        ({"policy": {"plans": []}}, "has type dict: give a Policy"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        AdaccCallback(**arguments)


def test_a_function_that_makes_no_policy_is_named(train):
    with pytest.raises(ValueError, match=r"policy=\.\.\. is a function that returned None: let it return a Policy"):
        train([AdaccCallback(policy=lambda profile: None)])


def test_one_callback_given_twice_trains_as_if_given_once(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback, callback]).assert_equals(train([AdaccCallback(**lossless)]))
    assert [event["event"] for event in callback.history].count("policy") == 1


def test_a_callback_that_is_added_during_the_run_is_refused():
    with pytest.raises(RuntimeError, match=r"added while its Trainer trains: pass it in callbacks"):
        AdaccCallback().on_step_begin(None, None, None)


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
