"""jupyter-kernel-client: the small Python client that agents use; token as Bearer header and in the query."""
import pytest
from jupyter_kernel_client import JupyterKernelClient


@pytest.fixture
def kernel(server):
    with JupyterKernelClient(server_url=server.url.rstrip("/"), token=server.token) as client:
        yield client


def test_code_runs_and_state_persists(kernel):
    assert kernel.execute("x = 20")["status"] == "ok"
    reply = kernel.execute("x + 1")
    assert reply["status"] == "ok"
    assert reply["outputs"][0]["data"]["text/plain"] == "21"


def test_text_and_charts_come_back(kernel):
    reply = kernel.execute("%matplotlib inline\nimport matplotlib.pyplot as plt\nprint('before')\n"
                           "plt.plot([3, 1, 2])\nplt.show()", timeout=120)
    assert reply["outputs"][0]["text"] == "before\n"
    assert any("image/png" in o.get("data", {}) for o in reply["outputs"])


def test_errors_carry_name_and_traceback(kernel):
    reply = kernel.execute("[][1]")
    assert reply["status"] == "error"
    assert reply["outputs"][0]["ename"] == "IndexError"
    assert reply["outputs"][0]["traceback"]


def test_variables_are_listed(kernel):
    kernel.execute("name = 'Ada'")
    assert any(v["name"] == "name" for v in kernel.list_variables())


def test_variables_can_be_read(kernel, backend):
    if backend == "vm":
        pytest.skip("the client's get_variable needs its package jupyter_mimetypes beside the kernel")
    kernel.execute("name = 'Ada'")
    assert "Ada" in str(kernel.get_variable("name"))


def test_input_is_answered(kernel):
    asked = []

    def answer(message):
        asked.append(message["content"]["prompt"])
        kernel._manager.client.input("Grace")

    reply = kernel.execute("print('hello', input('who? '))", allow_stdin=True, stdin_hook=answer)
    assert asked == ["who? "]
    assert reply["outputs"][-1]["text"].endswith("hello Grace\n")


def test_restart_forgets_and_works_on(kernel):
    kernel.execute("x = 1")
    kernel.restart(timeout=60)
    reply = kernel.execute("'x' in globals()", timeout=60)
    assert reply["outputs"][0]["data"]["text/plain"] == "False"


def test_the_kernel_is_listed_with_its_model(kernel):
    model = next(k for k in kernel.list_kernels() if k["id"] == kernel.id)
    assert model["name"]
    assert model["execution_state"] in ("starting", "idle", "busy")
    assert kernel.last_activity is not None
