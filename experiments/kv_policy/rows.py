"""What was measured, as rows of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """experiment: prose, task or cost. budget: most tokens kept; of full attention the longest row, or 0. case: number of the
    text or of the block of prompts, or the length of a row. measure: what `value` is."""

    experiment: str
    arm: str
    budget: int
    case: int
    measure: str
    value: float


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Header and rows, as they come: what was measured before an interruption is there."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({**asdict(row), "value": f"{row.value:.6g}"})
            file.flush()


def read_csv(path: Path) -> list[Row]:
    """Raises KeyError and ValueError for what is no such file."""
    with path.open(newline="") as file:
        return [
            Row(row["experiment"], row["arm"], int(row["budget"]), int(row["case"]), row["measure"], float(row["value"]))
            for row in csv.DictReader(file)
        ]
