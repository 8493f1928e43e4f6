"""The main path on the template people use: a dataframe over several turns, and its chart."""
import base64

import conftest
import pytest


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = conftest.Gateway(tmp_path_factory.mktemp("python"), "--template-only", "python",
                               "--pool-parked", "1")
    yield running
    running.stop()


def test_dataframe_description_and_chart(gateway):
    kernel = gateway.start()
    gateway.text(kernel, "import pandas as pd\ndf = pd.DataFrame({'a': range(10), 'b': list('xyxyxyxyxy')})")
    described = gateway.execute(kernel, "df.describe()")["outputs"][0]
    assert "4.5" in "".join(described["data"]["text/plain"])
    assert "<table" in "".join(described["data"]["text/html"])
    chart = gateway.execute(kernel, "import matplotlib.pyplot as plt\ndf.groupby('b').a.sum().plot.bar()\n"
                                    "plt.show()")
    assert chart["status"] == "ok", chart["error"]
    images = [o["data"]["image/png"] for o in chart["outputs"] if "image/png" in o.get("data", {})]
    assert len(images) == 1
    png = base64.b64decode("".join(images[0]))
    assert png.startswith(b"\x89PNG") and len(png) > 3000
    gateway.delete(kernel)


def test_the_libraries_of_the_template_work(gateway):
    kernel = gateway.start()
    assert gateway.text(kernel, "import numpy, scipy.stats, sklearn.linear_model as m, PIL.Image, requests\n"
                                "x = numpy.arange(10.0).reshape(-1, 1)\n"
                                "print(round(m.LinearRegression().fit(x, 2 * x.ravel() + 1).coef_[0], 6))") == "2.0"
    gateway.delete(kernel)


def test_two_kernels_draw_different_random_numbers(gateway):
    kernels = [gateway.start(), gateway.start()]
    drawn = [gateway.text(k, "import numpy, random\nprint(numpy.random.rand(), numpy.random.default_rng().random(),"
                             " random.random())") for k in kernels]
    assert not set(drawn[0].split()) & set(drawn[1].split())
    for kernel in kernels:
        gateway.delete(kernel)
