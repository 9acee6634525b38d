"""Profiles of single kinds of blocks: activations, names of values, and records that are read again."""


def test_activations_are_what_is_saved_and_the_block_input(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2, attention="eager")
    kind = profile.kinds[0]
    assert kind.values[0].name == "hidden_states"
    assert {value.index for value in kind.activations} == {0, *kind.slots} - {
        value.index for value in kind.values if value.shared is not None
    }
    assert profile.kind_of(profile.blocks[1]) is kind


def test_values_of_one_name_are_numbered(tape_builder):
    tape = tape_builder()
    tape.operator("norm", [tape.value("start", 8)], [("norm", 8), ("norm", 4)], 1.0, save=[0, -2, -1])
    assert tape.kind().names == ["start", "norm", "norm#2"]
