"""The tracker's process as the supervisor sees it: started again when it ends, given up in the end, and waited for at the end.

    owns        the process (`tracking`)
    waits for   in `finish`, once no role is left, that it has sent the rest: `_FINISH_S` at most
    woken by    the supervisor's poll
    on close    what was not sent stays in the run's files, and is sent when the run is continued

It can hang, raise or die: the run does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from async_rlhf.launch.program import Launcher, tracker_node
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.child import MAX_DEATHS, Child

_LOOK_S = 0.1
_FINISH_S = 60.0
_FIRST_PAUSE_S = 1.0


class Tracker:
    """The supervisor's end. event: called with what ended the process."""

    def __init__(
        self, config: Config, run: RunDir, launcher: Launcher, event: Callable[[str], None], now: Callable[[], float]
    ) -> None:
        self._run, self._launcher, self._event, self._now = run, launcher, event, now
        self._child = Child(tracker_node(run.log("tracker")), wanted=config.tracking.kind != "none")

    def look(self) -> bool:
        """Whether it runs or will be started again. Never waits."""
        child, now = self._child, self._now()
        child.beats(now)
        if (end := child.end()) is not None and end.code == 0:  # only when the run has ended
            child.process, child.wanted = None, False
        elif end is not None:
            self._died(f"ended with code {end.code}: {end.reason}")
        elif child.process is None and child.wanted and now >= child.start_at:
            try:
                child.started(self._launcher.start(self._run.path, child.node), now)
            except OSError as error:
                self._died(f"cannot be started: {error}")
        return child.process is not None or child.wanted

    def finish(self, stop: Callable[[], bool]) -> None:
        """Wait until it has sent everything and ended; then it is killed."""
        if self._child.process is None and not self._child.deaths:
            return  # it was never started
        deadline = self._now() + _FINISH_S
        while self.look() and not stop() and self._now() < deadline:
            time.sleep(_LOOK_S)
        if self._child.process is not None:
            self._child.kill()
            self._event(f"the tracker was not ready {_FINISH_S:.0f} s after the end; see {self._child.node.log}")

    def _died(self, how: str) -> None:
        child = self._child
        pause_s = child.died(self._now(), _FIRST_PAUSE_S)
        if child.deaths >= MAX_DEATHS:
            child.wanted = False
            self._event(f"the tracker {how}; given up after {child.deaths} times, the files of the run have everything")
        elif child.deaths == 1:
            self._event(f"the tracker {how}; starting it again in {pause_s:.1f} s")
