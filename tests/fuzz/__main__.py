"""Rubbish at a live hub: `python -m tests.fuzz --frames 1000000 --seed 0`. Ends with 1 when something broke."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.campaign import run

# A hub that keeps anything of each frame would grow by far more.
MAX_GROWTH_MIB = 32.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def progress(sent: int) -> None:
        print(f"\r{sent} of {arguments.frames} frames", end="", file=sys.stderr)  # noqa: T201

    report = run(arguments.frames, arguments.seed, progress)
    closes = report.status["ledger"]["closes"]
    print(  # noqa: T201
        f"\n{report.frames} frames in {report.seconds:.0f} s; {report.answers} answers; the hub grew by "
        f"{report.growth_mib:.1f} MiB; an honest learner did {report.steps} steps meanwhile; ledger closes: {closes}\n"
        f"refused: {report.status['refused']}"
    )
    return int(report.growth_mib > MAX_GROWTH_MIB or not closes)


if __name__ == "__main__":
    sys.exit(main())
