"""The debug switch sets PyTorch's mode for a cycle, lifts it where waiting is allowed, and puts it back."""

import pytest
import torch

from sdsie_sglang.worker.sync_check import syncs_are_allowed, syncs_are_errors


@pytest.fixture
def modes(monkeypatch):
    set_to = ["default"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: set_to[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_to.append)
    return set_to


def test_errors_within_a_cycle_and_not_after_it(modes):
    with syncs_are_errors(True):
        assert modes[-1] == "error"
        with syncs_are_allowed():
            assert modes[-1] == "default"
        assert modes[-1] == "error"
    assert modes[-1] == "default"


def test_put_back_after_a_failure(modes):
    with pytest.raises(RuntimeError), syncs_are_errors(True):
        raise RuntimeError("waited")
    assert modes[-1] == "default"


def test_nothing_is_set_unless_asked_for(modes):
    with syncs_are_errors(False):
        assert modes == ["default"]
