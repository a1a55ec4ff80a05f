"""Pictures of the page: `python -m tests.watch.pictures RUN_DIR OUT`, on a desktop and a phone, light and dark.

Of the two runs of docs/daemon.md, taken while the second one runs, `docs/pictures/daemon.png` is the light desktop, and of the
second alone `watch.png` and `watch-phone.png` are the light desktop and the dark phone. Needs chromium and chromedriver.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from async_rlhf.watch.runs import Runs
from tests.watch.browser import DESKTOP, PHONE, opened
from tests.watch.serving import serving


def main(run: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with serving(Runs(run)) as site, opened() as browser:
        for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
            for colours in ("light", "dark"):
                browser.open(site.url, size, colours)
                path = out / f"{device}-{colours}.png"
                browser.picture(str(path))
                Image.open(path).convert("RGB").quantize(256).save(
                    path, optimize=True
                )  # half the size, and nothing that one sees


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
