"""Stored prices of a profile, and their renewal on request."""

import logging

import pytest

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.files import PROFILES_VARIABLE
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profile_cache import ProfileCache

CONFIG = AdaccConfig(min_compress_bytes=0)
REUSE = CONFIG.with_overrides(reuse_prices=True)


@pytest.fixture
def store(tmp_path, monkeypatch) -> ProfileCache:
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "profiles"))
    return ProfileCache()


@pytest.fixture
def measured_classes(monkeypatch):
    """The block classes of the tapes that were priced by measuring."""
    classes = []
    price = Measurement.price

    def price_and_record(self, tape, *others):
        classes.append(tape.block_class)
        return price(self, tape, *others)

    monkeypatch.setattr(Measurement, "price", price_and_record)
    return classes


def prices(profile):
    return [([operator.ms for operator in kind.operators], [v.codecs for v in kind.values]) for kind in profile.kinds]


def test_known_tapes_are_not_priced_again_when_asked(store, measured_classes, tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    first = profile_model(model, batch, CONFIG)
    assert len(measured_classes) == len(store.list()) == 1
    again = profile_model(model, batch, REUSE)
    assert len(measured_classes) == 1
    assert prices(again) == prices(first)
    profile_model(model, batch, CONFIG)
    assert len(measured_classes) == 2, "not asked"


@pytest.mark.parametrize("change", ["batch", "settings", "attention"])
def test_anything_else_is_priced(store, measured_classes, tiny_gpt2, token_batch, change):
    profile_model(tiny_gpt2("sdpa"), token_batch(), CONFIG)
    batch = token_batch(3) if change == "batch" else token_batch()
    config = REUSE.with_overrides(outliers=False) if change == "settings" else REUSE
    profile_model(tiny_gpt2("eager" if change == "attention" else "sdpa"), batch, config)
    assert len(measured_classes) == len(store.list()) == 2


def test_a_codec_that_is_new_is_priced(store, measured_classes, tiny_gpt2, token_batch, request):
    model, batch = tiny_gpt2(), token_batch()
    profile_model(model, batch, CONFIG)
    name = request.getfixturevalue("half_precision")
    profile = profile_model(model, batch, REUSE)
    assert len(measured_classes) == len(store.list()) == 2
    assert name in {option.codec for value in profile.kinds[0].values for option in value.codecs}


@pytest.mark.parametrize("damage", ["a file in place of the folder", "a file that is not JSON"])
def test_a_broken_folder_never_loses_a_run(store, measured_classes, tiny_gpt2, token_batch, caplog, damage):
    if damage == "a file in place of the folder":
        store.folder.write_text("no folder")
    else:
        profile_model(tiny_gpt2(), token_batch(), CONFIG)
        (path,) = store.folder.iterdir()
        path.write_text("{")
        measured_classes.clear()
    with caplog.at_level(logging.WARNING):
        profile = profile_model(tiny_gpt2(), token_batch(), REUSE)
    assert profile.kinds
    assert len(measured_classes) == 1
    (record,) = caplog.records
    assert "the profile cache is disabled for this run, and prices are measured" in record.message
    assert "adacc profiles clear" in record.message
    assert PROFILES_VARIABLE in record.message


@pytest.mark.parametrize(
    "damage",
    [
        {"operators": [{"name": "one"}], "activations": []},
        {"scarce": "memory"},
        *({"activations": [{"value": 0, "codecs": [record]}]} for record in ("text", 7, ["int8"], None)),
    ],
)
def test_damaged_prices_are_measured_anew(store, measured_classes, tiny_gpt2, token_batch, caplog, damage):
    profile_model(tiny_gpt2(), token_batch(), CONFIG)
    (row,) = store.list()
    store.put(row.key, row.block_class, row.prices | damage)
    with caplog.at_level(logging.WARNING):
        profile_model(tiny_gpt2(), token_batch(), REUSE)
    assert len(measured_classes) == 2
    assert "are damaged" in caplog.text
