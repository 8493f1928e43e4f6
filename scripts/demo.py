#!/usr/bin/env python3
"""Three cells in one microVM through the REST API: python3 demo.py URL CHART.png
The token comes in CELLVISOR_DEMO_TOKEN. Standard library only."""
import base64
import json
import os
import sys
import time
import urllib.error
import urllib.request

CELLS = [
    ("load a dataframe",
     "import pandas as pd\n"
     "df = pd.DataFrame({'day': range(1, 31), 'visits': [(d * 37) % 50 + 3 * d for d in range(1, 31)]})\n"
     "print(len(df), 'rows, columns', list(df.columns))"),
    ("df.describe()", "df.describe()"),
    ("a chart",
     "import matplotlib.pyplot as plt\n"
     "df.plot(x='day', y='visits', title='Visits a day')\n"
     "plt.show()"),
]


class Api:
    def __init__(self, url, token):
        self.url, self.token = url.rstrip("/"), token

    def call(self, method, path, body=None):
        request = urllib.request.Request(
            self.url + path, method=method, data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"})
        # A proxy in the environment is not for loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=300) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            sys.exit(f"demo: {method} {path}: {error.code} {error.read().decode(errors='replace')}")
        except OSError as error:
            sys.exit(f"demo: {method} {path}: {error}")
        return json.loads(data) if data else None


def show(result):
    """Print the text of a cell's outputs; return the PNG in them, if any."""
    png = None
    if result["status"] != "ok":
        error = result.get("error") or {}
        sys.exit(f"demo: the cell ended with {result['status']}: {error.get('ename')}: {error.get('evalue')}")
    for output in result["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            png = base64.b64decode("".join(data["image/png"]))
        elif output["output_type"] == "stream":
            print("".join(output["text"]), end="")
        elif "text/plain" in data:
            print("".join(data["text/plain"]))
    return png


def main():
    url, chart = sys.argv[1:3]
    api = Api(url, os.environ["CELLVISOR_DEMO_TOKEN"])
    start = time.monotonic()
    kernel = api.call("POST", "/api/kernels", {})
    about = kernel.get("cellvisor") or {}
    print(f"kernel {kernel['id']} started in {(time.monotonic() - start) * 1000:.0f} ms")
    png = None
    for number, (title, code) in enumerate(CELLS, 1):
        start = time.monotonic()
        result = api.call("POST", f"/api/kernels/{kernel['id']}/execute", {"code": code})
        print(f"\n--- cell {number}: {title} ({(time.monotonic() - start) * 1000:.0f} ms)")
        png = show(result) or png
    api.call("DELETE", f"/api/kernels/{kernel['id']}")
    if not png or not png.startswith(b"\x89PNG"):
        sys.exit("demo: the third cell produced no PNG")
    with open(chart, "wb") as f:
        f.write(png)
    print(f"isolation: {about.get('tier', 'unknown')} (template {about.get('template', 'unknown')})")
    print(f"chart: {chart} ({len(png)} bytes)")


if __name__ == "__main__":
    main()
