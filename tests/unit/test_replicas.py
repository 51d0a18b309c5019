"""A server of several replicas is one of ours only if all are, and runs a policy only if all do."""

from pathlib import Path

import pytest

from sdsie_sglang.eval.server import Server, ServerFailed


def live(policy="fixed", hooks=("a",)):
    return {"sdsie": {"hooks": list(hooks), "gate": {"policy": {"policy": policy}, "cycles": 1}}}


@pytest.fixture
def server(monkeypatch):
    server = Server(None, 1, Path("/nowhere"), 0.0)

    def of(*states):
        monkeypatch.setattr(server, "info", lambda: {"internal_states": list(states)})
        return server

    return of


def test_one_and_several(server):
    assert server(live()).sdsie()["gate"]["cycles"] == 1
    assert len(server(live(), live()).replicas()) == 2
    assert server(live(), live()).sdsie()["gate"]["policy"] == {"policy": "fixed"}


def test_replicas_come_by_rank_and_not_as_they_answered(server):
    states = [{"sdsie": {**live()["sdsie"], "dp_rank": rank}} for rank in (1, 2, 0)]
    assert [replica["dp_rank"] for replica in server(*states).replicas()] == [0, 1, 2]


@pytest.mark.parametrize("states", [(), ({},), (live(), {}), (live(), live(hooks=()))])
def test_every_replica_must_be_ours(server, states):
    with pytest.raises(ServerFailed, match="without sdsie"):
        server(*states).sdsie()


@pytest.mark.parametrize("other", [live("entropy"), live(hooks=("a", "b")), {"sdsie": {"hooks": ["a"], "gate": None}}])
def test_replicas_must_be_alike(server, other):
    with pytest.raises(ServerFailed, match="same policy"):
        server(live(), other).sdsie()
