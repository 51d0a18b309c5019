"""If a decision is not executed, the run fails: shown by cutting the wire between the two."""

import pytest
import requests

from sdsie_sglang.eval.server import Server
from tests.e2e.conftest import CONTEXT, install_plugin


@pytest.fixture
def saboteur_path(tmp_path, request):
    return install_plugin(tmp_path, request.path.parent / "saboteur" / "sdsie_saboteur.py")


def test_a_cut_wire_ends_the_server(models, draft, prompts, saboteur_path):
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    arguments += ["--sdsie-policy", "schedule", "--sdsie-schedule", "0,3"]
    with Server.start([*arguments, "--skip-server-warmup"], env={"PYTHONPATH": saboteur_path}) as server:
        with pytest.raises(requests.RequestException):
            server.generate(prompts[0], max_new_tokens=24, ignore_eos=True)
        server.process.wait(60)
        assert "GearNotExecuted: gear 0 was decided, but" in server.log.read_text(errors="replace")
