"""The start of a run, in this order (`prepare`):

1. the data, rewards, packages, devices and the model's files are checked (`run.checks.preflight`); nothing is written
2. of a run to continue: how far it has gone, and what was changed while it went on (`run.live`)
3. other hosts are connected, every process gets its place (`run.hosts`), and must fit there (`run.checks.memory`)
4. the run directory is made, or opened again and set back to a checkpoint (`run.run_dir`); this process holds its lock
5. the supervisor starts the processes (`run.supervision.supervisor`), each of which is a role (`run.processes.roles`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DamagedError
from async_rlhf.launch.placement import Inventory, Placement
from async_rlhf.learner.checkpoint.resuming import check_step, go_back, newest
from async_rlhf.learner.checkpoint.store import complete, step_of
from async_rlhf.learner.loop.budget import Spent
from async_rlhf.learner.model.gguf import model_directory
from async_rlhf.run.checks.images import ImageLoad
from async_rlhf.run.checks.memory import check_memory
from async_rlhf.run.checks.preflight import Prepared, check_converted, preflight
from async_rlhf.run.checks.spool import make_spool
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.hosts.connections import connect, found_by, launcher_of, meeting_address
from async_rlhf.run.hosts.placement import inventory_of, placement_of, table
from async_rlhf.run.live import check_resumed, undo
from async_rlhf.run.loading import override
from async_rlhf.run.processes.evaluation import evaluate_alone, forget_evaluations
from async_rlhf.run.processes.tracking import rewind
from async_rlhf.run.run_data import Rows, RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import line_of_step
from async_rlhf.run.scoring import reward_specs, stop_strings
from async_rlhf.run.supervision.child import MAX_DEATHS
from async_rlhf.run.supervision.supervisor import Supervisor


def prepare(
    config: Config,
    *,
    rows: Rows | None = None,
    resume: bool = False,
    from_step: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    max_deaths: int = MAX_DEATHS,
    inventory: Inventory | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[Supervisor, RunDir]:
    """Refuse everything that can be refused; the returned supervisor holds the run's lock and only has to `run`.

    rows: of `rows_of`, where they are loaded already. inventory: the hosts, where they are known already. variables: further
    ones of its processes on this machine. Raises ConfigError, DamagedError.
    """
    config, prepared = _checked(config, rows or rows_of(config, None, resume))
    config = with_reward_settings(config)
    if not prepared.rows[1] and config.evaluation.source is None:
        none = config.evaluation.model_copy(update={"at_start": False, "at_end": False})
        config = config.model_copy(update={"evaluation": none})
    if from_step is not None and not resume:
        raise ConfigError(f"--from-step {from_step} continues an existing run: give --resume too")
    if overwrite and resume:
        raise ConfigError("--overwrite removes the run that --resume continues: give only one of them")
    if resume:
        _check_steps(config, from_step)
        check_resumed(RunDir.existing(config.run_dir), config)
    done = resume and from_step is None and _is_finished(config)
    connections = None
    if config.data.spool is not None:
        make_spool(config.data.spool)
    if not done:
        config, connections = connect(config)
    try:
        hosts, of_hosts = found_by(connections)
        placement, _ = _startable(config, inventory or inventory_of(config, hosts), hosts, prepared.images)
        if resume:
            directory = _reopened(config, from_step)
        else:
            directory = RunDir.create(config, prepared.rows, prepared.dropped, overwrite=overwrite)
        launcher = launcher_of(config, directory, connections, placement)
    except AsyncRLHFError:
        if connections is not None:
            connections.close()
        raise
    directory.variables.update(variables or {})
    if progress is not None:
        for remark in (*prepared.remarks, *of_hosts):
            progress.event(remark)
    supervisor = Supervisor(
        config, directory, launcher, progress, placement=placement, on_step=on_step, max_deaths=max_deaths, done=done
    )
    return supervisor, directory


def check_startable(config: Config) -> list[str]:
    """The checks of `prepare` but for the run directory; no process is started. Returns remarks for a person. Raises
    ConfigError."""
    config, prepared = _checked(config, None)
    places(config, prepared.images)
    return prepared.remarks


def places(config: Config, images: ImageLoad | None) -> list[str]:
    """The hosts, devices and memory of a run's processes, in lines for a person. images: of its prompts.

    Raises ConfigError where they cannot.
    """
    config, connections = connect(with_reward_settings(config))
    try:
        hosts, of_hosts = found_by(connections)
        inventory = inventory_of(config, hosts)
        placement, of_memory = _startable(config, inventory, hosts, images)
    finally:
        if connections is not None:
            connections.close()
    return [*of_hosts, *table(config, inventory, placement), *of_memory]


def _startable(config: Config, inventory: Inventory, hosts: Inventory, images: ImageLoad | None) -> tuple[Placement, list[str]]:
    """The placement of a run that fits and can be started from here, and what it takes. hosts: that the launcher reaches.

    Raises ConfigError.
    """
    placement = placement_of(config, inventory)
    of_memory = check_memory(config, inventory, placement, images=images)
    if elsewhere := sorted({slot.host for slot in placement.slots.values()} - {"", *(host.name for host in hosts)}):
        raise ConfigError(
            f"[[placement.hosts]] places processes on {', '.join(elsewhere)}, but launch.kind = {config.launch.kind!r} reaches "
            f"{', '.join(host.name for host in hosts) or 'this machine'} only; list reachable hosts, or none"
        )
    meeting_address(config, placement)
    anywhere = ("actor-", "scorer-", "relay-", "learner-rank-")
    only_here = [name for name, slot in placement.slots.items() if slot.host and not name.startswith(anywhere)]
    if only_here:
        raise ConfigError(
            f"{only_here[0]} is placed on {placement.slots[only_here[0]].host}, but can run on this machine only; list as many "
            "devices of this machine as it needs, or leave evaluations out (evaluation.every, at_start, at_end)"
        )
    return placement, of_memory


def _check_steps(config: Config, from_step: int | None) -> None:
    """Raises ConfigError for a run that has gone further than it is to go."""
    made = [step_of(path) for path in complete(config.run_dir / "checkpoints")]
    metrics, newest_line = RunDir(config.run_dir).metrics, None
    with suppress(DamagedError):
        newest_line = line_of_step(metrics)
    made.append(0 if newest_line is None else newest_line["step"])
    done = max(made) if from_step is None else min(from_step, max(made))
    back = "" if from_step is not None else ", or go back with --from-step"
    if config.max_steps is not None and config.max_steps < done:
        raise ConfigError(
            f"max_steps = {config.max_steps}, and run directory {str(config.run_dir)!r} has done {done} steps. "
            f"Lowest: {done}{back}"
        )
    last = None if newest_line is None else line_of_step(metrics, done)
    if last is not None and (ended := config.budget.ended(Spent.before(last))):
        raise ConfigError(
            f"{ended} before step {done}, the last of run directory {str(config.run_dir)!r}: raise that limit{back}"
        )


def _reopened(config: Config, from_step: int | None) -> RunDir:
    """The directory of a run to continue, its checkpoint looked at: the newest by the sizes of its files, for its learner
    digests them; a requested one by its digests, for what came after it is then set aside."""
    if from_step is not None:
        check_step(config.run_dir, from_step)  # before anything is written
    directory = RunDir.reopen(config)
    try:
        if from_step is None:
            newest(directory.path, contents=False)
        else:
            forget_evaluations(directory, after=from_step)
            rewind(directory, from_step)
            go_back(directory.path, from_step)
            undo(directory, from_step)
    except AsyncRLHFError:
        directory.retire()
        raise
    return directory


def _is_finished(config: Config) -> bool:
    """Whether the run of this configuration has ended with nothing left to train on, and is to go no further.

    Raises ConfigError for the run of another configuration.
    """
    run = RunDir(config.run_dir)
    end = run.end()
    if end is None or not end.finished or config.budget.exceeds(run.config().budget):
        return False
    records = run.read_evaluations()
    if run.config().evaluation.plateau(records) and not config.evaluation.plateau(records):
        return False  # it was given more patience
    run.check_same(config)
    return True


def evaluate(config: Config, model: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Evaluate a model directory (or GGUF file) on a configuration's held-out prompts or `evaluation.source`, without a run.

    Returns what a line of `evaluations.jsonl` has. Raises ConfigError before the model is loaded, and what ends an evaluation.
    """
    config, prepared = _checked(override(config, {"model": str(model)}), None)
    return evaluate_alone(with_reward_settings(config), prepared, (progress or Progress()).evaluating)


def rows_of(config: Config, data: Iterable[Any] | None, resume: bool) -> Rows:
    """Those that are given, those that a run to continue began with, or those that the configuration names.

    Raises ConfigError, also where there is no run to continue, or it began with other rows than those that are given.
    """
    if resume:
        RunDir.existing(config.run_dir)  # checked before any of its files is read
    kept = RunData(config.run_dir, config.data)
    if not (resume and kept.is_kept):
        return load_rows(config.data, data)
    if data is not None and not kept.is_from(load_rows(config.data, data)):
        raise ConfigError(
            f"run directory {str(config.run_dir)!r} began with other rows, and a run keeps its rows; give the same or none"
        )
    training, held_out = map(list, kept.rows)  # every row is looked at, several times
    return training, held_out


def _checked(config: Config, rows: Rows | None) -> tuple[Config, Prepared]:
    """The configuration with its model's directory, and what `preflight` has found. Raises ConfigError."""
    prepared, model = preflight(config, rows), model_directory(config.model)
    if model == config.model:
        return config, prepared
    config = config.model_copy(update={"model": model})  # converted from a file, in which `preflight` cannot look
    return config, check_converted(config, prepared)


def with_reward_settings(config: Config) -> Config:
    """The configuration with what rewards say of themselves (weights, stop strings) written out: a run's record is whole."""
    weights = {spec.name: spec.weight for spec in reward_specs(config) if spec.weight != 1.0} | config.rewards.weights
    rewards = config.rewards.model_copy(update={"weights": weights})
    return config.model_copy(
        update={"rewards": rewards, "generation": config.generation.model_copy(update={"stop": stop_strings(config)})}
    )
