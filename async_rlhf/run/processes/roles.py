"""The main function of each process of a run: picks the parts of its role, wires them, runs, and ends with an exit code.

A launcher begins it as `python -m async_rlhf.run.processes.roles ROLE RUN_DIR ...`, or forks it; the wings are imported in the
process that needs them. A role lives no longer than the supervisor that started it (`launch.tether`) and ignores the signals
that a terminal sends to all processes: the supervisor decides. A role that was started by hand ends in order on SIGINT or
SIGTERM, and at once on the second.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from async_rlhf.buffers.config import REQUEST_TIMEOUT_S, WeightsConfig
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.buffers.files import written
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.transport.keys import load_hub
from async_rlhf.buffers.transport.link import connector
from async_rlhf.buffers.weights.relay import Relay
from async_rlhf.buffers.weights.shared import is_local
from async_rlhf.launch.exit_codes import end_with, exit_code
from async_rlhf.launch.machine import assigned_threads
from async_rlhf.launch.program import title
from async_rlhf.launch.tether import Tether
from async_rlhf.run.checks.model import longest_prompt
from async_rlhf.run.config import Config
from async_rlhf.run.hosts.placement import with_threads
from async_rlhf.run.loading import parse_settings
from async_rlhf.run.processes.agreement import schema, shared
from async_rlhf.run.processes.evaluation import environments_of, import_models, run_evaluation
from async_rlhf.run.processes.learner import backend_of, make_trainer, run_rank
from async_rlhf.run.processes.tracking import run_tracker
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import stage_specs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.actors.engine import Bits
    from async_rlhf.actors.loop.context import RunContext
    from async_rlhf.actors.prompts import Row
    from async_rlhf.buffers.clients.actor import ActorClient

_log = logging.getLogger(__name__)


def run_hub(run: RunDir, config: Config, *addresses: str, beat: Callable[[], None] = lambda: None) -> None:
    """The replay queue, the weight channel and the ledger. beat: called by the hub's loop, twice a second."""
    from async_rlhf.buffers.hub.hub import Hub
    from async_rlhf.buffers.hub.prompts import Prompts
    from async_rlhf.run.checks.spool import open_spool

    data, spool = RunData(run.path, config.data), open_spool(run, config)
    if spool is not None:
        num_prompts = spool.stream.num_rows
    else:
        num_prompts = data.num_prompts if config.data.epochs is not None else config.data.size
    access = load_hub(config.security.directory) if config.security.directory is not None else None
    bound, order, prompts = config.bound(num_prompts), data.open_order(), None
    if order is not None:
        bound = replace(bound, numbers=order.num_numbers)
    if spool is not None:
        prompts = Prompts(spool, order, config.data.curriculum)
    elif order is not None:
        prompts = Prompts(None, order, config.data.curriculum, data.num_prompts)
    Hub(
        addresses,
        run.path,
        config.queue,
        bound,
        access=access,
        weights=config.weights,
        prompt_of=partial(data.prompt_of, config.seed, order),
        schema=schema(config, run.images),
        shared=shared(config, data),
        beat=beat,
        prompts=prompts,
        little_room=partial(little_room, run.path, config.disk_pause_bytes),
    ).run()


def little_room(directory: Path, pause_bytes: int) -> str:
    """Why no further group should be begun; empty where there is room. A disk that cannot be measured has room."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= pause_bytes:
        return ""
    return f"the disk has {written(free)} left, less than disk_pause_bytes ({written(pause_bytes)}): no group is begun"


def run_learner(run: RunDir, config: Config, address: str, meeting: str = "") -> None:
    """Run the learner, from the newest checkpoint on. meeting: where it meets its other ranks, if there are any."""
    import_models()
    from async_rlhf.buffers.clients.learner import LearnerClient

    connect, broadcaster = connector(config.security.directory), None
    if config.broadcasts:
        from async_rlhf.buffers.device.ends import LearnerEnd
        from async_rlhf.buffers.device.group import group_on

        broadcaster = LearnerEnd(config.weights.device_timeout_s, group_on(config.learner.device))
    if config.no_broadcasts:
        _log.warning("weights are not broadcast, and come by the hub: %s", config.no_broadcasts)
    client = LearnerClient(
        address, timeout_s=REQUEST_TIMEOUT_S, connect=connect, weights=config.weights, broadcaster=broadcaster
    )
    with backend_of(run, config, meeting) as backend:
        _log.info("ended: %s", make_trainer(run, config, client, backend).run())
    client.close()


def run_learner_rank(run: RunDir, config: Config, rank: str, meeting: str) -> None:
    import_models()
    run_rank(run, config, int(rank), meeting)


def run_scorer(run: RunDir, config: Config, address: str) -> None:
    """The stages that are run once for all actors of the host."""
    from async_rlhf.actors.scoring.server import ScoringServer

    specs = [spec for spec in stage_specs(config) if config.scoring.in_process(spec.name)]
    ScoringServer(specs, config.scoring, address, is_private=True).run()


def run_actor(
    run: RunDir, config: Config, address: str, name: str, scorer: str = "", *, progress: Callable[[], None] | None = None
) -> None:
    """Run an actor: engine, scoring pool and loop.

    scorer: where the scorer process listens, if there is one. progress: called when a completion has been scored.
    """
    import_models()
    from transformers import AutoTokenizer

    from async_rlhf.actors.engine import RolloutKey, check_room, load_engine
    from async_rlhf.actors.loop.worker import Worker
    from async_rlhf.actors.scoring.pool import ScoringPool
    from async_rlhf.buffers.stages import SpanFile

    data = RunData(run.path, config.data)
    rows = data.epoch()
    tokenizer = from_pretrained(AutoTokenizer, Path(config.model))
    images = data.image_processor(config.model)
    engine = load_engine(config.model, config.served_engine, on_update=config.generation.on_update, images=images)
    check_room(engine, longest_prompt(config)[0], config.generation.longest_completion)
    client = _actor_client(config, data, address, name, engine.bits)
    client.keep_beating()

    def scored() -> None:
        client.wake()
        if progress is not None:
            progress()

    scoring = ScoringPool[RolloutKey](
        stage_specs(config), config.scoring, scored, scorer, config.rewards.by_source, images=data.images.directory
    )
    spans = SpanFile(run.spans(name), config.max_log_bytes)
    refill = config.rewards.composition if config.advantage.constant_groups == "refill" else None
    further = {"partial_every": scoring.stream_tokens, "refill": refill, "images": images}
    try:
        with environments_of(config, tokenizer, client.wake, images) as environments:
            reason = Worker(
                name,
                client,
                engine,
                scoring,
                run_context(config, rows, tokenizer, environments=environments, **further),
                config.actor_capacity,
                config.engine.canary_tolerance,
                spans.write,
            ).run()
        _log.info("ended: %s", reason)
    finally:
        spans.close()
        scoring.close()
        client.close()
        engine.close()


def _actor_client(config: Config, data: RunData, address: str, name: str, bits: Bits) -> ActorClient:
    """bits: of its engine, which the hub gets where the run asks for them. With a seat in the device channel where that
    serves the run and the hub is on this machine."""
    from async_rlhf.buffers.clients.actor import ActorClient

    take_seat = None
    if config.broadcasts and is_local(address):
        from async_rlhf.buffers.device.ends import EngineEnd
        from async_rlhf.buffers.device.group import group_on

        take_seat = EngineEnd(config.weights.device_timeout_s, group_on(config.engine.device))
    return ActorClient(
        address,
        name,
        beat_s=config.queue.beat_s,
        timeout_s=REQUEST_TIMEOUT_S,
        connect=connector(config.security.directory),
        weights=config.weights,
        shared=shared(config, data),
        take_seat=take_seat,
        bits=bits if config.asks_for_bits else ("", ""),
    )


def run_context(config: Config, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, **further: Any) -> RunContext:
    """The prompts and seeds of this run's group numbers. further: as in `RunContext`."""
    from async_rlhf.actors.loop.context import RunContext

    return RunContext(config.seed, rows, config.generation, tokenizer, config.data.row_template, **further)


def run_relay(run: RunDir, config: Config, hub: str, address: str) -> None:
    """Run the relay between the hub and the actors of another host."""
    Relay(hub, address, config.weights, connector(config.security.directory)).run()


def relay_by_hand(
    hub: str, address: str, keys: Path | None, own_keys: Path | None, overrides: Sequence[str], say: Callable[[str], None]
) -> None:
    """Returns after SIGINT or SIGTERM. Raises ConfigError for what cannot be, DeadlineError when the hub does not let it in."""
    for given, directory, option in ((hub, keys, "--keys"), (address, own_keys, "--own-keys")):
        if directory is None and not is_local(given):
            raise ConfigError(f"{given!r} is beyond this machine and needs {option} (make keys: async-rlhf keys new DIR)")
    config = WeightsConfig.model_validate(parse_settings(("weights",), overrides)["weights"])
    access = None if own_keys is None else load_hub(own_keys)
    relay = Relay(hub, address, config, connector(keys), access)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    say(f"relays between {hub} and actors at {address}")
    relay.run()


_ROLES: dict[str, Callable[..., None]] = {
    "hub": run_hub,
    "learner": run_learner,
    "learner_rank": run_learner_rank,
    "scorer": run_scorer,
    "relay": run_relay,
    "actor": run_actor,
    "evaluation": run_evaluation,
    "tracker": run_tracker,
}


_SAY_WHAT_IS_DONE = ("actor", "evaluation", "tracker")


class _AskedToEnd(BaseException):
    """Raised where a role that was started by hand is, when it is signalled; what it holds is closed on the way up."""


def _end_in_order(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise _AskedToEnd(signal.Signals(number).name)


def main(arguments: list[str]) -> int:
    """Run a role; the exit code is the reason (see `exit_codes`)."""
    role, directory, *rest = arguments
    setproctitle(title(arguments))
    sys.path.append(str(Path.cwd()))  # as the command does
    tether = Tether.from_environment()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if tether.is_tied else _end_in_order)
    if tether.is_tied:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    tether.follow()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    callbacks = {"beat": tether.beat} if role == "hub" else {"progress": tether.progress} if role in _SAY_WHAT_IS_DONE else {}
    try:
        run = RunDir.existing(directory, tether.lock)
        _ROLES[role](run, with_threads(run.config(), assigned_threads()), *rest, **callbacks)
    except AsyncRLHFError as error:
        _log.exception("%s ends", role)
        sys.stderr.write(f"fatal: {error}\n")
        return exit_code(error)
    except _AskedToEnd as asked:
        _log.info("ended at the request of %s", asked)
    return 0


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
