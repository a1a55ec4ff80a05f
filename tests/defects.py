"""Defects that are planted one at a time, each a mistake that could really be made: the tests named with it must find it.

    python -m tests.defects [NAME ...] [--all] [--every]

Of each defect a line is printed: the test that found it, or NOT FOUND, and then the command ends with 1. A defect is found when a
test fails with it, in a temporary copy of the working tree, and passes in the same copy without it. An error while tests are
imported or prepared finds nothing, and neither does a test that does not end in time. The simulation has defects of its own
(`tests/simulation/mutations.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
_GRACE_S = 20.0  # for a test that was interrupted to end what it started


@dataclass(frozen=True)
class Defect:
    """`old`, which is once in `file`, becomes `new`. breaks: what is promised and then no longer so. tests: under tests/, files
    or parts of them, the quickest first. deadline_s: for all of them."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    deadline_s: float = 120.0


DEFECTS = (
    Defect(
        "bound-is-one-too-wide",
        "no token that is trained on is older than max_staleness",
        "buffers/queue/bound.py",
        "return max(0, self.last_step(number, dead_below) - self.max_staleness)",
        "return max(0, self.last_step(number, dead_below) - self.max_staleness - 1)",
        ("buffers/queue",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """failed: the tests that failed in their own code. said: the last line of pytest, or why there is none."""

    failed: Sequence[str]
    said: str


def check(defects: Sequence[Defect]) -> None:
    """Raises ValueError for one that cannot be planted: the code it is about has changed."""
    for defect in defects:
        count = (REPOSITORY / defect.file).read_text().count(defect.old)
        if count != 1:
            raise ValueError(f"{defect.name}: what it replaces is {count} times in {defect.file}; write it anew")


@contextmanager
def working_copy() -> Iterator[Path]:
    """The working tree as it is now, without what git ignores; links stay links. Removed with the end of the block."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="defect-", ignore_cleanup_errors=True) as directory:
        copy = Path(directory) / "tree"
        for name in filter(None, names):
            if os.path.lexists(REPOSITORY / name):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, copy / name, follow_symlinks=False)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """In which Python imports the package from this copy, though another is installed."""
    return {**os.environ, "PYTHONPATH": str(copy)}


def check_imports(copy: Path, file: str) -> None:
    """Raises RuntimeError unless it is the copy that is imported."""
    program = "import async_rlhf, sys, importlib.util as u; print(async_rlhf.__file__, u.find_spec(sys.argv[1]).origin)"
    module = "async_rlhf." + file.removeprefix("async_rlhf/").removesuffix(".py").replace("/", ".")
    command = [sys.executable, "-c", program, module]
    shown = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True).stdout.split()
    if [Path(each).resolve() for each in shown] != [copy / "async_rlhf" / "__init__.py", copy / file]:
        raise RuntimeError(f"the tests would not run in the copy: {' and '.join(shown)} would be imported")


def run_tests(copy: Path, tests: Sequence[str], deadline_s: float, *options: str) -> Outcome:
    """Run these tests in the copy, in one process."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={copy.parent}/made"]
    process = subprocess.Popen(
        [*command, *options, *tests],
        cwd=copy,
        env=environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return Outcome((), f"not over after {deadline_s:.0f} s")
    summary = output.rpartition("short test summary info")[2].splitlines()
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in summary if line.startswith("FAILED ")]
    return Outcome(failed, output.strip().rpartition("\n")[2].strip("= "))


def hunt(defect: Defect, options: Sequence[str]) -> Outcome:
    """Plant one defect and run its tests."""
    with working_copy() as copy:
        file = copy / defect.file
        if defect.file.endswith(".py"):
            check_imports(copy, defect.file)
        sound = file.read_text()
        file.write_text(sound.replace(defect.old, defect.new))
        outcome = run_tests(copy, [f"tests/{each}" for each in defect.tests], defect.deadline_s, *options)
        if not outcome.failed:
            return outcome
        file.write_text(sound)
        without = run_tests(copy, outcome.failed, defect.deadline_s)
        if without.failed or " passed" not in without.said:
            return Outcome((), f"without the defect, too: {without.said}")
        return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which defects; all of them without")
    parser.add_argument("--all", action="store_true", help="with the tests that only `make test-all` runs")
    parser.add_argument("--every", action="store_true", help="go on after the first test that finds a defect, and name all")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {defect.name for defect in DEFECTS}:
        parser.error(f"no defect is called {', '.join(sorted(unknown))}; there are {', '.join(d.name for d in DEFECTS)}")
    chosen = [defect for defect in DEFECTS if defect.name in (arguments.names or (defect.name,))]
    check(chosen)
    options = [*([] if arguments.every else ["-x"]), *([] if arguments.all else ["-m", "not rest"])]
    missed = 0
    for defect in chosen:
        began = time.monotonic()
        outcome = hunt(defect, options)
        missed += not outcome.failed
        by = dict.fromkeys(each.partition("[")[0] for each in outcome.failed)
        found = f"found by {', '.join(by)}" if by else f"NOT FOUND ({outcome.said}): {defect.breaks}"
        print(f"{defect.name} ({time.monotonic() - began:.0f} s): {found}", flush=True)  # noqa: T201
    print(f"{len(chosen) - missed} of {len(chosen)} found")  # noqa: T201
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
