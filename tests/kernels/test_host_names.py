"""Names of codecs in host memory."""

import pytest

from adacc_hf.kernels._host_names import HOST, encoding_of, is_on_host, on_host
from adacc_hf.kernels.codecs import list_codecs


@pytest.mark.parametrize("name", list_codecs())
def test_every_codec_has_one_name_in_host_memory(name: str) -> None:
    assert not is_on_host(name)
    assert is_on_host(on_host(name))
    assert encoding_of(on_host(name)) == encoding_of(name) == name


def test_the_codec_that_encodes_nothing_has_its_own_name() -> None:
    assert is_on_host(HOST)
    assert encoding_of(HOST) == HOST
    assert HOST not in list_codecs()
