"""@jupyterlab/services, the library inside JupyterLab, under Node: see services.cjs for the steps."""
import pytest


@pytest.mark.parametrize("framing", ["v1", "legacy"])
def test_jupyterlab_services(server, node, framing):
    code, output = node("services.cjs", server.url, server.token, framing)
    print(output)
    assert code == 0, output
    assert output.count("ok   ") >= 14
