"""Cost of payloads in host memory, in the records and in the simulator."""

from dataclasses import replace

import pytest

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import RETAIN, Choice, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.kernels._host_payloads import ALIGNMENT
from adacc_hf.solve.simple_policies import policy_of_plans

LINK = HostLink(to_host_bytes_per_ms=10.0, to_device_bytes_per_ms=5.0, copy_ms=1.0)
ONE, FOUR = ALIGNMENT, 4 * ALIGNMENT
"""Most bytes of the pool that a small payload of one tensor takes, and one of up to four tensors."""


@pytest.fixture
def kind(tape_builder, make_codec):
    """A kind with an input of 40 bytes, and a saved activation of 100 bytes that codec int8 stores in 60."""
    tape = tape_builder()
    start = tape.value("input", 40, is_movable=True)
    (hidden,) = tape.operator("hidden", [start], [("hidden", 100)], 1.0, save=[-1])
    tape.values[hidden] |= {"codecs": (make_codec("int8", 60, 2.0, 3.0),), "is_movable": True}
    tape.operator("last", [hidden], [("last", 8)], 1.0, save=[start])
    return replace(tape.kind(), host_link=LINK)


def plan_with(kind, **codecs):
    """Return the plan that stores the named values with codecs, and retains the others."""

    def choice(value):
        names = {option.codec: option for option in kind.codec_options(value.index)}
        return Choice.compress(names[codecs[value.name]]) if value.name in codecs else RETAIN

    return Plan(kind=kind.digest, choices=tuple((value.index, choice(value)) for value in kind.activations))


def test_a_moved_payload_costs_its_bytes_over_the_bandwidth(kind):
    hidden = next(value.index for value in kind.values if value.name == "hidden")
    options = {option.codec: option for option in kind.codec_options(hidden)}
    assert list(options) == ["int8", "host", "int8+host"]
    host, after_int8 = options["host"], options["int8+host"]
    assert (host.nbytes, host.host_bytes, host.staging_bytes) == (0, ONE, 0)
    assert (host.encode_ms, host.decode_ms, host.error, host.lossless) == (1 + 10, 1 + 20, 0.0, True)
    assert (after_int8.nbytes, after_int8.host_bytes, after_int8.staging_bytes) == (0, FOUR, 60)
    assert (after_int8.encode_ms, after_int8.decode_ms) == (2 + 1 + 6, 3 + 1 + 12)
    assert (after_int8.error, after_int8.options) == (options["int8"].error, options["int8"].options)


def test_without_a_link_or_for_other_values_nothing_moves(kind):
    hidden = next(value.index for value in kind.values if value.name == "hidden")
    assert [option.codec for option in replace(kind, host_link=None).codec_options(hidden)] == ["int8"]
    assert kind.codec_options(next(value.index for value in kind.values if value.name == "last")) == ()


def test_the_simulator_counts_payloads_on_the_device_only_while_they_are_copied(kind):
    plain, on_device = run_block(kind, plan_with(kind)), run_block(kind, plan_with(kind, hidden="int8"))
    moved, encoded = (run_block(kind, plan_with(kind, hidden=name)) for name in ("host", "int8+host"))
    assert (plain.host_bytes, on_device.host_bytes, moved.host_bytes, encoded.host_bytes) == (0, 0, ONE, FOUR)
    assert (plain.stored_bytes, on_device.stored_bytes) == (140, 100)
    assert (moved.stored_bytes, encoded.stored_bytes) == (40, 40)
    assert encoded.overhead_ms == on_device.overhead_ms + 1 + 6 + 1 + 12
    # While the payload is copied, as much is live as if it stayed; afterwards, its bytes are free.
    assert encoded.forward_working_bytes == on_device.forward_working_bytes
    assert encoded.forward_moments[-1] == on_device.forward_moments[-1] - 60
    assert encoded.working_bytes == on_device.working_bytes
    assert moved.working_bytes == on_device.working_bytes - 60


def test_inputs_of_checkpointed_blocks_move_too(kind):
    (start,) = kind.inputs
    options = {option.codec: option for option in kind.codec_options(start.index)}
    kept = run_block(kind, checkpoint_plan(kind))
    moved = run_block(kind, checkpoint_plan(kind, {start.index: Choice.compress(options["host"])}))
    assert (kept.stored_bytes, kept.host_bytes) == (40, 0)
    assert (moved.stored_bytes, moved.host_bytes) == (0, ONE)
    assert moved.overhead_ms == kept.overhead_ms + options["host"].encode_ms + options["host"].decode_ms


def test_a_step_stores_the_payloads_of_all_blocks_at_its_peak(kind, profile_of):
    profile = profile_of([kind], [0, 0, 0])
    plans = [plan_with(kind, hidden="host"), plan_with(kind, hidden="int8+host", input="host"), plan_with(kind)]
    assert simulate(profile, plans).host_bytes == ONE + (FOUR + ONE)


def test_records_survive_their_files(kind, profile_of, tmp_path):
    profile = replace(profile_of([kind], [0]), host_free_bytes=1000)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    policy = policy_of_plans(profile, [plan_with(kind, hidden="host")])
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy
    assert policy.predicted_host_bytes == ONE
    assert "1 compress (1 in host memory)" in policy.summary()
    assert "512 B in host memory" in policy.summary()


def test_a_profile_without_codecs_below_a_size_moves_none_of_them(kind, profile_of):
    profile = profile_of([kind], [0]).without_codecs_below(50)
    assert [value.name for value in profile.kinds[0].values if value.is_movable] == ["hidden"]


def test_host_is_no_name_for_the_setting_of_codecs():
    with pytest.raises(ValueError, match=r"codecs=\['host'\] are unknown: .*\. host_memory=\.\.\. moves payloads"):
        AdaccConfig(codecs=("host",))
