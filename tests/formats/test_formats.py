"""What earlier versions left on disk is read by this one; what a newer one left is refused by name and stays as it is.

`run-N` is a run directory of format N: three steps of a random model, with its journal kept and `@HERE@` for the folder that it
lies in. That of format 2 has an environment, that of format 3 one whose rows begin anew, that of format 4 an agent whose calls
have scores, played by a model whose experts are recorded. To be kept as they are: a change that cannot read one raises `oldest`
in `async_rlhf/buffers/files.py`, and adds another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from async_rlhf.buffers import files
from async_rlhf.buffers.errors import ConfigError, FormatError, WireError
from async_rlhf.buffers.files import Format
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue import segment
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.learner.checkpoint.resuming import newest
from async_rlhf.learner.checkpoint.store import SCHEMA, CheckpointError
from async_rlhf.run.loading import load, override
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from tests.conftest import output_of
from tests.formats.sample import SAMPLES, copied


@pytest.fixture(params=SAMPLES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    return copied(tmp_path, request.param)


def content(run: RunDir) -> dict[str, bytes]:
    """Of all files but what Python keeps beside a reward that was imported."""
    files = [path for path in run.path.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def test_everything_in_the_sample_carries_a_number_and_is_read(run: RunDir) -> None:
    config = run.config()
    training, held_out = RunData(run.path, config.data).rows
    assert (len(training), len(held_out)) == (config.data.size, config.data.held_out)
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]
    assert json.loads((run.path / "manifest.json").read_text())["format"] == int(run.path.name.removeprefix("run-"))
    checkpoint = newest(run.path)
    assert checkpoint is not None and checkpoint[1]["step"] == 2 and checkpoint[1]["schema"] == 2
    weights = WeightStore(run.path / "weights").get(2)
    assert {tensor.name for tensor in weights.manifest().tensors} >= {"model.embed_tokens.weight", "lm_head.weight"}
    batches = list(read_batches(run.path / "queue"))
    assert [[each.number for each in batch.groups] for batch in batches] == [record["groups"] for record in run.read_metrics()]
    assert sum(rollout.num_tokens for batch in batches for group in batch.groups for rollout in group.rollouts) == sum(
        record["num_tokens"] for record in run.read_metrics()
    )
    rollouts = [rollout for batch in batches for group in batch.groups for rollout in group.rollouts]
    assert any(rollout.restarts for rollout in rollouts) == (run.path.name in ("run-3", "run-4"))
    of_calls = [rollout.routing is not None and len(rollout.turn_scores) == len(rollout.turn_lengths) for rollout in rollouts]
    assert all(of_calls) == (run.path.name == "run-4")
    journal = Journal(run.path / "queue")
    assert (journal.replay.state.committed_step, journal.replay.torn_bytes) == (3, 0)
    journal.close()


def test_settings_that_moved_stand_where_they_are_now(tmp_path: Path) -> None:
    run = copied(tmp_path, 4)
    written = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(written.replace('kv_policy = "full"', 'kv_policy = "window"'))
    assert run.config().engine.kv.policy == "window"
    served = written.replace('kind = "torch"', 'kind = "vllm"').replace("tensor_parallel_size = 1", "tensor_parallel_size = 2")
    (run.path / "config.toml").write_text(served)
    assert run.config().engine.tensor_parallel_size == 2
    for key, now in (("kv_policy", "engine.kv.policy"), ("vllm.arguments.seed", "engine.tensor_parallel_size and engine.arg")):
        with pytest.raises(ConfigError, match=rf"unknown key 'engine\.(kv_policy|vllm)': it has become {now}"):
            load("quick", {f"engine.{key}": "window"})


def test_a_learner_goes_on_from_the_checkpoint_of_the_sample_with_the_groups_of_its_journal(run: RunDir) -> None:
    from async_rlhf.learner.loop.source import ArchiveSource
    from async_rlhf.run.processes.learner import backend_of, make_trainer

    def train_again(run: RunDir) -> list[dict[str, Any]]:
        config = run.config()
        with backend_of(run, config, "") as backend:
            make_trainer(run, config, ArchiveSource(run.path / "queue"), backend).run()
        return run.read_metrics()

    before, after = run.read_metrics()[2], train_again(run)[2]
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]
    assert after["groups"] == before["groups"] and after["loss"] == pytest.approx(before["loss"], abs=1e-4)
    checkpoint = newest(run.path)
    assert checkpoint is not None and checkpoint[1]["step"] == 3


@pytest.mark.parametrize("verb", ["status", "stop", "train", "train --resume", "rollouts show"])
def test_a_run_directory_of_a_newer_format_is_refused_by_every_command_and_left_as_it_is(run: RunDir, verb: str) -> None:
    manifest = run.path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": files.RUN.newest + 1}))
    before, config = content(run), run.path / "config.toml"
    words = ["train", str(config), *verb.split()[1:]] if verb.startswith("train") else [*verb.split(), str(run.path)]
    output = output_of(3, *words)
    newest = files.RUN.newest
    refused = f"a run directory of format {newest + 1}, this version of async-rlhf reads 1 to {newest}. Nothing was changed"
    assert f"{run.path}: {refused}" in output
    assert content(run) == before


def test_a_run_directory_without_a_number_is_read_and_has_one_when_it_goes_on(run: RunDir) -> None:
    manifest = run.path / "manifest.json"
    known = json.loads(manifest.read_text())
    del known["format"]
    manifest.write_text(json.dumps(known))
    config = override(RunDir.existing(run.path).config(), {"max_steps": 4})
    RunDir.reopen(config).retire()
    made = json.loads(manifest.read_text())
    (since,) = made.pop("later")
    assert made == {**known, "format": files.RUN.newest} and since["sources"] != known["sources"], "it goes on with newer code"


def newer_journal(run: RunDir) -> None:
    state = {"format": files.JOURNAL.newest + 1, "something": "new"}
    payload = msgpack.packb(state)
    (run.path / "queue" / "000002.log").write_bytes(segment.head(segment.STATE, [payload]) + payload + b"what none can read")


def newer_weights(run: RunDir) -> None:
    head = msgpack.packb({"format": files.WEIGHTS.newest + 1, "something": "new"})
    (run.path / "weights" / "00000003.weights").write_bytes(len(head).to_bytes(8, "little") + head)


def newer_checkpoint(run: RunDir) -> None:
    state = run.latest / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "schema": SCHEMA + 1}))


@pytest.mark.parametrize(
    ("make", "read", "words"),
    [
        (newer_journal, lambda run: Journal(run.path / "queue"), "a journal of format 4, this version .* reads 1 to 3"),
        (newer_journal, lambda run: list(read_batches(run.path / "queue")), "a journal of format 4"),
        (newer_weights, lambda run: WeightStore(run.path / "weights"), r"00000003\.weights: a weight set of format 2"),
        (newer_checkpoint, lambda run: newest(run.path), "has schema 3, this version reads up to 2"),
    ],
)
def test_what_a_newer_version_wrote_is_refused_by_its_number_and_not_cut_off(
    run: RunDir, make: Callable[[RunDir], None], read: Callable[[RunDir], object], words: str
) -> None:
    (run.path / "queue" / "lock").touch()
    make(run)
    before = content(run)
    with pytest.raises((FormatError, CheckpointError), match=words):
        read(run)
    assert content(run) == before
    with pytest.raises((FormatError, CheckpointError)):  # no lock is left behind
        read(run)


def test_a_journal_and_weights_without_a_number_are_of_the_first_format() -> None:
    payload = msgpack.packb({"committed_step": 7})
    found = segment.parse(segment.head(segment.STATE, [payload]) + payload, 0)
    assert found is not None and found[0] == QueueSnapshot(committed_step=7)


def test_a_group_of_an_older_protocol_is_read_as_long_as_its_message_is_the_same() -> None:
    header = msgpack.packb([wire.PROTOCOL - 1, 5, {"type": "bye"}])
    request, message, _ = wire.decode([header], max_frame_bytes=1 << 20, oldest=wire.PROTOCOL - 1)
    assert (request, message) == (5, wire.Bye())
    for frames, oldest in (([header], wire.PROTOCOL), ([msgpack.packb([wire.PROTOCOL + 1, 5, {}])], 1)):
        with pytest.raises(WireError, match=f"protocol .*; this side has protocol {wire.PROTOCOL}"):
            wire.decode(frames, max_frame_bytes=1 << 20, oldest=oldest)


@pytest.mark.parametrize(
    ("found", "words"), [(4, "reads 2 to 3.*a newer version"), (1, "an older version"), ("2", "format '2'")]
)
def test_a_number_outside_what_is_read_is_refused_with_the_version_to_use(found: object, words: str) -> None:
    known = Format("a thing", 3, oldest=2)
    known.check(2)
    known.check(3)
    with pytest.raises(FormatError, match=words):
        known.check(found)
