import gpt2_pile
import pytest
from recipe_arguments import DataArguments, parse_arguments


def test_no_arguments_mean_the_demo():
    args = parse_arguments([])
    assert (args.model.model, args.data.dataset, args.data.tokenizer, args.method.method) == (
        "demo",
        "stdlib",
        "train",
        "adacc",
    )
    assert args.data.vocab_size == 512
    assert args.method.memory_budget == "0.5"
    assert args.training.output_dir == "runs/demo-adacc"
    assert args.training.report_to == []


@pytest.mark.parametrize(
    ("argv", "output_dir"),
    [
        (["--model", "gpt2-117m", "--method", "full"], "runs/gpt2-117m-full"),
        (["--model=org/name"], "runs/name-adacc"),
        (["--method", "compare"], "runs/demo-compare"),
        (["--output_dir", "elsewhere"], "elsewhere"),
    ],
)
def test_run_folder_is_named_after_model_and_method(argv: list[str], output_dir: str):
    assert parse_arguments(argv).training.output_dir == output_dir


def test_a_setting_beats_the_default_of_the_model():
    assert parse_arguments(["--max_steps", "7"]).training.max_steps == 7
    assert parse_arguments(["--model", "gpt2-117m"]).training.max_steps == 10_000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("validation_fraction", 1.0, r"--validation_fraction=1\.0 must lie between 0 and 1"),
        ("validation_fraction", 0.0, r"--validation_fraction=0\.0 must lie between 0 and 1"),
        ("max_eval_sequences", 0, r"--max_eval_sequences=0 must be at least 1"),
        ("tokenizer_documents", -1, r"--tokenizer_documents=-1 must be at least 1"),
    ],
)
def test_data_settings_out_of_range(field: str, value: float, message: str):
    with pytest.raises(ValueError, match=message):
        DataArguments(**{field: value})


def test_help_has_a_short_usage_the_docstring_and_the_settings(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        gpt2_pile.parse_settings(["--help"])
    assert end.value.code == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage.endswith("[--SETTING VALUE ...]")
    assert "\n" not in usage
    assert rest.startswith(gpt2_pile.__doc__.strip())
    own_settings = rest[len(gpt2_pile.__doc__) :]
    assert 0 < own_settings.find("--model MODEL") < own_settings.find("--output_dir")
