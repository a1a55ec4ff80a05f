"""Many schedules: `python -m tests.simulation --seeds 0:1000000 --jobs 2`. Ends with 1 at the first seed that breaks a rule,
after printing its shortest story.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import xxhash

from tests.simulation import schedule

_BLOCK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:10000", help="first:end, or one seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print the whole trace of one seed")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    if arguments.trace:
        print(schedule.story(schedule.run(int(first)), last=1 << 30))  # noqa: T201
        return 0
    seeds = range(int(first), int(end) if end else int(first) + 1)
    blocks = ((start, min(start + _BLOCK, seeds.stop)) for start in range(seeds.start, seeds.stop, _BLOCK))
    began, done, events, total = time.monotonic(), 0, 0, xxhash.xxh3_128()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for count, num_events, digest, failed in pool.imap(schedule.run_block, blocks):
            done, events = done + count, events + num_events
            total.update(digest.encode())
            rate = done / (time.monotonic() - began)
            print(f"\r{done}/{len(seeds)} schedules, {events} events, {rate:.0f} schedules/s", end="", file=sys.stderr)  # noqa: T201
            if failed is not None:
                print(f"\n{schedule.story(schedule.shrink(schedule.run(failed)))}")  # noqa: T201
                return 1
    print(f"\n{done} schedules, no rule broken; digest of all traces {total.hexdigest()}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
