"""JupyterLab 4 with --gateway-url in headless Chromium: a person's first minutes, see jupyterlab.cjs."""
import json
import os
import shutil

import launch
import pytest
from PIL import Image

LINE = (214, 39, 40)  # the colour the third cell plots with


def colours(image, box):
    """How many pixels of the plotted colour and how many different colours a part of a picture holds."""
    part = image.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"])).convert("RGB")
    counts = part.getcolors(maxcolors=1 << 24)
    near = sum(n for n, c in counts if all(abs(a - b) < 12 for a, b in zip(c, LINE)))
    return near, len(counts)


def test_table_and_chart_are_visible_and_the_kernel_obeys(server, node, backend, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        pytest.skip("chromium is missing: run scripts/test --stage setup")
    lab = launch.jupyterlab(tmp_path / "lab.log", tmp_path, server)
    picture = os.environ.get("CELLVISOR_SCREENSHOT") or str(tmp_path / "lab.png")
    try:
        code, output = node("jupyterlab.cjs", lab.url, lab.token, picture, timeout=280,
                            env={"CHROMIUM": browser, "SLOW": "3" if backend == "vm" else "1"})
    finally:
        lab.stop(expect_code=None)
    print(output)
    assert code == 0, output + server.log.read_text()[-3000:]
    seen = json.loads(output[output.index("RESULT ") + 7:].splitlines()[0])
    assert seen["interrupted"] and seen["forgotten"]
    with Image.open(picture) as image:
        line, different = colours(image, seen["chart"])
        assert line > 200, "the plotted line is not in the picture"
        assert different > 20
        _, different = colours(image, seen["table"])
        assert different > 5, "the table looks empty"
