"""What an operator sees of the hub: one dictionary of plain values, sent on request and written as `ledger.json`.

Only reads; called by `exchange`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.transport.peers import Peers


def describe(admission: Admission, peers: Peers, now: float) -> dict[str, Any]:
    """Step, versions, ledger and actors; ready for JSON."""
    return {
        "step": admission.step,
        "committed_step": admission.committed_step,
        "fence": admission.fence,
        "version": admission.published,
        "queued_bytes": admission.room.queued,
        "ledger": admission.ledger.as_dict(),
        "actors": {
            name: {
                **peers[name].telemetry.model_dump(),
                "version": actor.version,
                "capacity": actor.capacity,
                "groups": len(actor.leases),
                "silent_s": round(now - actor.last_seen, 3),
            }
            for name, actor in admission.fleet.actors.items()
        },
    }


def fleet(admission: Admission, peers: Peers) -> dict[str, float]:
    """The actors' counters summed, how many there are, the queue's depth, and groups filtered: for the step record."""
    depth, actors = float(admission.num_queued), float(len(admission.fleet.actors))
    filtered = float(admission.num_filtered)
    return {**peers.telemetry(), "queue/depth": depth, "groups/filtered": filtered, "actors": actors}


def lacks_prompts(admission: Admission) -> bool:
    """Whether no batch can be made before further prompts come: all that are there have been made."""
    can_come = admission.bound.coming and not admission.draining
    return can_come and admission.order.next_number() is None and not admission.fleet.leased


def waiting_for(admission: Admission) -> str:
    """What the learner waits for, in words."""
    if lacks_prompts(admission):
        if made := admission.bound.num_numbers:
            return f"no prompts in the spool: all {made} groups of those that came were made"
        return "no prompts in the spool: none has come yet"
    ledger = admission.ledger
    if not admission.fleet.actors:
        return "no actor has joined"
    holders = ", ".join(f"{name}: {len(actor.leases)}" for name, actor in admission.fleet.actors.items())
    return f"{ledger.queued} groups are ready, {ledger.leased} are being made ({holders})"


def write(path: Path, status: dict[str, Any]) -> None:
    """Replace the file in one step: a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(status, indent=1) + "\n")
    temporary.replace(path)
