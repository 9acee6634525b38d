from pathlib import Path

import pytest
from accelerate.commands.config import load_config_from_file

CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_config(path: Path):
    # Accelerate refuses unknown keys.
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1


def test_there_is_one_config_per_setup():
    assert {path.stem for path in CONFIGS} == {"cpu", "single_gpu", "ddp", "fsdp2", "deepspeed_zero2"}
