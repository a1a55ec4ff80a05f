"""The report of a soak: slopes with verdicts, what was done to the run, what its books say; as a page, and samples."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from async_rlhf.experiments.page import plain, table
from async_rlhf.experiments.soak.sampling import GROWING, MEASURES
from async_rlhf.experiments.soak.slopes import slope
from async_rlhf.experiments.soak.soak import Books, SoakPlan, SoakSeen

# Growth per 1,000 steps of any measure that would go unnoticed: after a million steps 100 MiB, 100 descriptors.
LIMIT = 0.1
# Of a life, in seconds: what libraries load when they are first used, and buffers of the newest so many lines that fill.
_WARM_UP_S = 120.0


def write(plan: SoakPlan, seen: SoakSeen, books: Books, out: Path) -> bool:
    """report.md, and all samples as samples.jsonl. Whether nothing is shown to grow, the books are right, and the run has ended
    well."""
    rows, grows = [("process", "measure", "last", "per 1,000 steps (95 %)", "verdict")], False
    for (process, measure), samples in sorted(seen.samples.items()):
        growth = slope(samples, warm_up_h=min(_WARM_UP_S, plan.seconds / 4) / 3600)
        verdict = "too short" if growth is None else growth.verdict(LIMIT)
        shown = "" if growth is None else f"{growth.mean:+.3g} ({growth.low:+.3g} to {growth.high:+.3g})"
        rows.append((process, measure, f"{samples[-1].value:.4g} {MEASURES[measure]}".rstrip(), shown, verdict))
        grows = grows or verdict == "grows"
    kept = ", ".join(f"{part} {seen.parts[part] / max(1, books.steps):.0f}" for part in GROWING if part in seen.parts)
    right = (
        "the ledger closes, no group is lost or trained twice, every row was used as often as promised "
        f"({books.quarantined} groups quarantined)"
    )
    page = [
        "# A soak",
        f"{books.steps:,} steps in {seen.hours * 60:.1f} minutes; {books.rows:,} rows; exit code {seen.exit_code}; "
        f"{len(seen.kills):,} kills, {books.changes:,} live changes that took effect, {len(seen.rotations):,} files that "
        f"began anew, {seen.views['answered']:,} answers of the page, {seen.views['failed']:,} requests that failed.",
        f"**The books**: {'; '.join(map(plain, books.wrong)) or right}.",
        table(rows),
        f"Flat: the whole interval lies below {LIMIT} per 1,000 steps. Slopes lie within the lives of a process, behind "
        "the first two minutes of each.",
        f"Kept by design, bytes a step: {kept}.",
    ]
    (out / "report.md").write_text("\n\n".join(page) + "\n")
    with (out / "samples.jsonl").open("w") as file:
        for (process, measure), samples in seen.samples.items():
            file.writelines(json.dumps({"process": process, "measure": measure, **asdict(sample)}) + "\n" for sample in samples)
    return seen.exit_code == 0 and not books.wrong and not grows
