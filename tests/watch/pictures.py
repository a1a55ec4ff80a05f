"""Pictures of the page: `python tests/watch/pictures.py OUT [RUN_DIR]`, all that a reviewer of the page wants to see.

Desktop and phone, light and dark, of a run of 100,000 steps, an empty and a broken one, one of episodes, of runs compared; and
of RUN_DIR where one is given: `docs/pictures/watch.png` and `watch-phone.png` are two of those of a quick run, `daemon.png` is
that of the two runs of docs/daemon.md, of which the second was given its prompts three times. Needs chromium and chromedriver.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import DESKTOP, PHONE, Browser, opened
from made_runs import broken_run, episode, made_run
from PIL import Image
from serving import serving

from async_rlhf.watch.runs import Runs

_WHOLE = 5200
"""Higher than the page is on a phone."""


def main(out: Path, run: Path | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, opened() as browser:
        runs = Path(directory) / "runs"
        runs.mkdir()
        made_run(runs / "long", 100_000)
        made_run(runs / "other", 80_000, seed=1)
        made_run(runs / "empty", 0)
        made_run(runs / "episodes", 400, seed=2, sampled=episode)
        broken_run(runs / "broken")
        with serving(Runs(runs)) as site:
            for name in ("", "long", "empty", "broken", "episodes"):
                draw(browser, f"{site.url}#{name}", out, name or "runs")
                draw(browser, f"{site.url}#{name}", out, f"{name or 'runs'}-whole", _WHOLE)
        if run is not None:
            with serving(Runs(run)) as site:
                draw(browser, site.url, out, "watch")


def draw(browser: Browser, url: str, out: Path, name: str, height: int | None = None) -> None:
    """height: of the picture, where it is to be another than the screen's."""
    for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
        size = size if height is None else (size[0], height)
        for colours in ("light", "dark"):
            browser.open(url, size, colours)
            path = out / f"{name}-{device}-{colours}.png"
            browser.picture(str(path))
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # half the size, and nothing that one sees


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
