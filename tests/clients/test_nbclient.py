"""nbclient through jupyter_server's GatewayKernelManager, as papermill and scheduled notebooks do it.
That client sends neither session id nor credentials on its websocket, hence the open gateway."""
import asyncio

import nbformat
import pytest
from jupyter_server.gateway.gateway_client import GatewayClient
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

MANAGER = "jupyter_server.gateway.managers.GatewayKernelManager"


@pytest.fixture
def run(open_server):
    GatewayClient.clear_instance()
    client = GatewayClient.instance()
    client.url = open_server.url.rstrip("/")

    def execute(*cells, **options):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        options = {"timeout": 60, "startup_timeout": 60, **options}
        runner = NotebookClient(notebook, kernel_name="python3", kernel_manager_class=MANAGER, **options)
        asyncio.run(runner.async_execute())
        return notebook

    yield execute
    GatewayClient.clear_instance()


def text_of(cell):
    return "".join(o.get("text", "") for o in cell.outputs)


def test_a_dataframe_lives_from_cell_to_cell(run):
    notebook = run("import pandas as pd\ndf = pd.DataFrame({'a': range(10)})", "df.describe()",
                   "print(df.a.sum())")
    data = notebook.cells[1].outputs[0]["data"]
    assert "4.5" in data["text/plain"]
    assert "<table" in data["text/html"]
    assert text_of(notebook.cells[2]) == "45\n"
    assert [c.execution_count for c in notebook.cells] == [1, 2, 3]


def test_a_chart_comes_back_as_png(run):
    notebook = run("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()")
    images = [o["data"]["image/png"] for o in notebook.cells[0].outputs if "data" in o]
    assert len(images) == 1
    assert images[0].startswith("iVBORw0KGgo")


def test_an_error_stops_the_notebook_with_its_traceback(run):
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run("1 / 0", "print('never')")


def test_errors_may_be_allowed(run):
    notebook = run("1 / 0", "print('still here')", allow_errors=True)
    assert notebook.cells[0].outputs[0]["ename"] == "ZeroDivisionError"
    assert text_of(notebook.cells[1]) == "still here\n"


def test_outputs_keep_their_order(run):
    notebook = run("import sys\nfor i in range(200):\n    print(i, file=sys.stderr if i % 2 else sys.stdout,"
                   " flush=True)")
    seen = [int(n) for o in notebook.cells[0].outputs for n in o["text"].split()]
    assert seen == list(range(200))


def test_display_updates_reach_the_first_display(run):
    notebook = run("from IPython.display import display, HTML\nh = display(HTML('one'), display_id='x')",
                   "h.update(HTML('two'))")
    assert notebook.cells[0].outputs[0]["data"]["text/html"] == "two"


def test_unicode_and_large_output_survive(run):
    notebook = run("print('\\u00e9\\u4e2d\\U0001f600' * 100000)")
    assert text_of(notebook.cells[0]) == "\u00e9\u4e2d\U0001f600" * 100000 + "\n"
