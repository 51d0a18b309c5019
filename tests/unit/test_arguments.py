import pytest

from sdsie_sglang.arguments import gives, value_of, without


def test_flags_are_taken_out_with_their_values():
    argv = [
        "--host",
        "0.0.0.0",
        "--tp-size",
        "2",
        "--api-key=secret",
        "--enable-metrics",
        "--ssl-keyf",
        "k",
        "--port",
        "1",
    ]
    assert without(argv, ["--host", "--port", "--api-key", "--ssl-keyfile"]) == ["--tp-size", "2", "--enable-metrics"]
    assert without(["--api-key", "--log-level", "error"], ["--api-key"]) == ["--log-level", "error"]


@pytest.mark.parametrize("argv", [["--speculative-draft-model-path", "d"], ["--speculative-draft-model=d"]])
def test_a_flag_is_known_in_full_and_cut_short(argv):
    assert gives(argv, "--speculative-draft-model-path")
    assert value_of(argv, "--speculative-draft-model-path") == "d"
    assert not gives(argv, "--model-path")
    assert value_of(argv, "--model-path") is None
