"""Defects that are planted one at a time, each a mistake that could really be made: the tests named with it must find it.

    python -m tests.defects [NAME ...] [--all] [--every]

Of each defect a line is printed: the test that found it, or NOT FOUND, and the command then ends with 1. A defect is found when
a test fails with it, in a temporary copy of the working tree, and passes in the same copy without it. An error while tests are
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
    deadline_s: float = 300.0


# fmt: off
DEFECTS = (
    # -- what crosses a process border
    Defect("bound-one-too-wide", "no token that is trained on is older than queue.max_staleness", "buffers/queue/bound.py",
           "self.last_step(number, dead_below) - within)",
           "self.last_step(number, dead_below) - within - 1)",
           ("buffers/queue/test_bound.py",)),
    Defect("exact-mode-one-version-late", "in exact mode group n is made by version max(0, step - S)", "buffers/queue/bound.py",
           "return version == low if self.exact else version >= low",
           "return version == low + (low > 0) if self.exact else version >= low",
           ("buffers/queue/test_bound.py",)),
    Defect("journal-without-fsync", "what was acknowledged survives a loss of power", "buffers/files.py",
           "self._files.sync(self._file)",
           "self._file.flush()",
           ("buffers/hub/test_full_disk.py", "simulation/test_simulation.py::test_the_schedules_break_no_rule")),
    Defect("acknowledged-too-early", "a group is acknowledged when it is on disk, not before", "buffers/hub/exchange.py",
           "self.outbox.acknowledge(identity, (group.number, group.attempt), request)",
           "self.outbox.send(identity, wire.Ack(groups=[(group.number, group.attempt)]), request=request)",
           ("buffers/hub/test_full_disk.py",)),
    Defect("stuck-actors-first", "an actor with which everything stands still is asked last", "buffers/queue/fleet.py",
           "if not actor.doubted} or with_room",
           "} or with_room",
           ("buffers/queue/test_suspects.py",)),
    Defect("lease-without-end", "the groups of an actor that falls silent are given to others", "buffers/queue/fleet.py",
           "if now - actor.last_seen > self._lease_s]",
           "if not actor.leases and now - actor.last_seen > self._lease_s]",
           ("buffers/queue/test_admission.py",)),
    Defect("death-not-heard", "an actor whose end was seen loses its groups at once", "buffers/hub/exchange.py",
           'self._admission.fleet.leave(name, "ended: its process is gone")',
           "pass",
           ("buffers/hub/test_peers.py::test_an_actor_whose_end_the_supervisor_saw_loses_its_groups_at_once",)),
    Defect("fence-begins-anew", "a learner that comes back has a higher fence than all before it", "buffers/queue/admission.py",
           "self.fence, self.committed_step, self.step = past.fence,",
           "self.fence, self.committed_step, self.step = 0,",
           ("buffers/hub/test_live_hub.py", "simulation/test_simulation.py::test_the_schedules_break_no_rule")),
    Defect("row-used-twice", "a row of a spool is used once, whatever dies when", "buffers/spool/claims.py",
           "rows = [row for row in self._good(lines) if row[0] > self.stream.tail]",
           "rows = self._good(lines)",
           ("buffers/spool/test_spool_laws.py",)),
    Defect("outcomes-counted-twice", "a curriculum counts the outcome of a group once", "buffers/curriculum.py",
           "for number, rate in outcomes if number in self._not_judged}.items())",
           "for number, rate in outcomes}.items())",
           ("buffers/test_curriculum.py",)),
    Defect("no-number-let-in", "a group whose log-probabilities are no numbers is refused", "buffers/protocol/packing.py",
           "if not (math.isfinite(low) and high <= MAX_LOGPROB):",
           "if low == -math.inf or high > MAX_LOGPROB:",
           ("buffers/hub/test_refusals.py",)),
    Defect("stranger-let-in", "only peers whose key is on the list are let in", "buffers/transport/keys.py",
           "and key in allowed:",
           "and len(key) == 32:",
           ("buffers/transport/test_security.py::test_only_curve_with_an_allowed_key_in_our_domain_is_let_in",)),
    Defect("weights-not-verified", "weights that are not what their digests say are not adopted", "buffers/weights/assembly.py",
           "if spec.digest != digest:",
           "if not digest:",
           ("buffers/weights/test_weight_set.py", "buffers/weights/test_delta.py")),
    Defect("parts-not-compared", "a set is what its announcement says, whatever came before", "buffers/weights/assembly.py",
           "and [spec for part in parts for spec in part.tensors] == announced.tensors",
           "and len(parts) == num_parts(self._num_bytes)",
           ("buffers/weights/test_parts.py::test_parts_are_no_other_set_however_alike",)),
    Defect("part-counted-twice", "a part that is sent twice is one", "buffers/weights/assembly.py",
           "if part.index not in self._parts and not self.memory.take(part.index, part.place):",
           "if not self.memory.take(part.index, part.place):",
           ("buffers/weights/test_parts.py",)),
    Defect("written-while-mapped", "what is mapped does not change", "buffers/weights/shared.py",
           "        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n        is_fixed",
           "        is_fixed",
           ("buffers/weights/test_shared.py", "buffers/weights/test_parts.py")),
    Defect("delta-on-another-base", "each delta is applied to the set that it was made from", "buffers/weights/assembly.py",
           "old = self._memory.view if number else base",
           "old = base",
           ("buffers/weights/test_channel.py",)),
    Defect("broadcast-not-compared", "a broadcast is adopted when it has the learner's digest", "buffers/weights/standby.py",
           " and weights.digest == digest:",
           ":",
           ("buffers/device/test_device_channel.py",)),
    Defect("failed-broadcasts-for-ever", "a broadcast that fails every time is given up", "buffers/weights/standby.py",
           """                self._lose("the learner's broadcast failed")""",
           "                self.close()",
           ("buffers/weights/test_broadcast.py",)),
    Defect("words-may-change-places", "words that change places change a digest", "buffers/device/digest.py",
           "enumerate(((R, words), (S, words >> 32)))",
           "enumerate(((R, words), (S, words)))",
           ("buffers/device/test_digest.py",)),
    Defect("waits-for-who-hangs", "an engine that hangs keeps the learner waiting once", "buffers/weights/broadcast.py",
           "and not states[member].is_member)",
           ")",
           ("buffers/weights/test_broadcast.py",)),
    Defect("gate-counts-twice", "a component that is a gate only opens or closes", "buffers/composition.py",
           "if score.value is not None and name not in self.gates\n",
           "if score.value is not None\n",
           ("buffers/test_composition.py",)),
    Defect("experts-of-another-position", "a pass takes the experts that computed each position", "learner/batch/packing.py",
           "len(prompt) + piece.start - number, predicting",
           "len(prompt) + piece.start, predicting",
           ("learner/test_routing.py",)),
    Defect("experts-of-another-pass", "what is computed again takes the experts of its own pass", "learner/model/routing.py",
           "return nullcontext(), self.given(self._experts_PMk)",
           "return nullcontext(), nullcontext()",
           ("learner/test_routing.py",)),
    # -- actors
    Defect("a-users-calendar-is-pythons", "a user's file sees its own folder first", "buffers/user_files.py",
           "return not _files(own) <= _files(elsewhere) and (own.origin is not None or elsewhere.origin is None)",
           "return False",
           ("actors/test_users_files.py::test_neighbours_of_one_name_live_beside_each_other",)),
    Defect("a-worker-s-children-spawn", "processes that a user's file starts work as in Python", "actors/workers/process.py",
           "_start_method = None",
           "_start_method = 'spawn'",
           ("actors/test_users_files.py::test_the_start_method_is_pythons_own_default",)),
    Defect("python-from-the-users-folder", "no process imports from the folder that it begins in", "buffers/interpreter.py",
           '[sys.executable, "-P", *arguments]',
           "[sys.executable, *arguments]",
           ("async_rlhf/test_reward_trial.py::test_a_reward_is_tried_beside_files_that_are_named_as_modules",)),
    Defect("held-out-trained-on", "held-out prompts are not trained on", "actors/data/rows.py",
           "return rows[:split], rows[split:]",
           "return rows, rows[split:]",
           ("actors/test_data_rows.py",)),
    Defect("cache-of-older-weights", "with on_update = interrupt a turn goes on with new weights alone",
           "actors/torch_engine/engine.py",
           'if self._on_update != "keep" or version < self.version:',
           "if version < self.version:",
           ("actors/test_episodes.py::test_what_is_recorded_is_what_plain_passes_say_whenever_weights_change[llama-0-interrupt]",
            "actors/conformance/test_continuations.py::"
            "test_weights_that_change_between_turns_are_in_the_spans[torch-interrupt]")),
    Defect("stamped-with-the-next", "every token carries the version that sampled it", "actors/torch_engine/engine.py",
           "self._rows.close_spans(self._scheduler.num_rows, self.version)",
           "self._rows.close_spans(self._scheduler.num_rows, version)",
           ("actors/test_torch_engine.py",
            "actors/conformance/test_conformance.py::test_an_update_in_mid_sequence_is_written_into_the_spans[torch-keep]")),
    Defect("temperature-left-out", "log-probabilities are of the distribution sampled from", "actors/torch_engine/sampling.py",
           "return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log(), kept",
           "return tokens[:, 0], torch.log_softmax(logits.float(), dim=-1).gather(1, tokens)[:, 0], kept",
           ("actors/conformance/test_conformance.py::test_logprobs_are_those_of_a_plain_forward_pass[torch-0.6]",)),
    Defect("spans-of-one-version", "the versions that vLLM reports are those in the record", "actors/vllm_engine/outputs.py",
           "spans = [(int(label.version), label.end - label.start)",
           "spans = [(oldest, label.end - label.start)",
           ("actors/test_vllm_terms.py",)),
    Defect("time-out-is-a-zero", "a score that takes too long has failed and is no number", "actors/scoring/reward_worker.py",
           "(Answer(None, came.result),)",
           "(Answer(0.0),)",
           ("actors/test_served_rewards.py", "actors/test_users_code.py")),
    Defect("turns-with-one-seed", "each turn of an episode has random numbers of its own", "actors/loop/episodes.py",
           "seed=turn_seed(first.seed, turn.number),",
           "seed=first.seed,",
           ("actors/test_episodes.py",)),
    Defect("call-in-another-conversation", "a call goes on in its own conversation", "actors/loop/reading.py",
           "past, anew = transcript.conversation(number), transcript.num_rows",
           "past, anew = transcript.turns, transcript.num_rows",
           ("actors/test_conversations.py",)),
    Defect("trained-on-though-not-wanted", "a call that is not trained on bears no loss", "actors/loop/transcript.py",
           "turn.wrote.spans if turn.trained else [Span(None, len(ids))]",
           "turn.wrote.spans",
           ("actors/test_conversations.py",)),
    Defect("prompt-of-another-member", "members are trained behind the prompts they had", "actors/loop/rollouts.py",
           "takewhile(lambda column: {*column} == {column[0]} - {end}, columns)",
           "columns",
           ("actors/test_conversations.py",)),
    Defect("retry-sampled-again", "a retry of an agent's call never makes a second turn", "actors/agents/sessions.py",
           "alone[0] if alone else known[-1] if known and is_retry else None",
           "None",
           ("actors/agents/test_agent_endpoint.py::test_what_was_answered_is_given_again_to_a_retry_and_asked_again_by_another_request",),
           deadline_s=420.0),
    Defect("reward-of-another-call", "a reward of one call is of that call's turn", "actors/loop/transcript.py",
           "turn.score for turn in (trained if is_agent else trained[:-1])",
           "turn.score for turn in self.turns if turn.trained",
           ("actors/test_conversations.py::test_scores_of_calls_stand_in_the_order_of_the_record_and_those_of_what_is_not_trained_on_nowhere",)),
    Defect("sampled-for-nobody", "a call behind another whose client has gone is not sampled", "actors/agents/sessions.py",
           "if call.num_waiting:",
           "if True:",
           ("actors/agents/test_harness_sessions.py::test_a_call_behind_another_whose_client_has_gone_is_left_out",)),
    # -- learner
    Defect("ratio-upside-down", "importance weights are proximal over behaviour", "learner/objective/corrections.py",
           "return ratio(logp_proximal_N.detach(), logp_behaviour_N).clamp(max=cap)",
           "return ratio(logp_behaviour_N, logp_proximal_N.detach()).clamp(max=cap)",
           ("learner/test_losses.py",)),
    Defect("clipped-on-the-wrong-side", "outside the clip region nothing pulls further", "learner/objective/losses.py",
           "value = torch.minimum(r * advantage, r.clamp(low, high) * advantage)",
           "value = torch.maximum(r * advantage, r.clamp(low, high) * advantage)",
           ("learner/test_losses.py",)),
    Defect("region-on-the-wrong-side", "outside a region of probabilities a token may come back", "learner/objective/losses.py",
           "far_N & (_moved(inputs) * inputs.advantage_N > 0)",
           "far_N & (_moved(inputs) * inputs.advantage_N < 0)",
           ("learner/test_trust_regions.py",)),
    Defect("a-teacher-on-old-data", "old data are weighed where a teacher is learned from", "learner/objective/losses.py",
           "return truncated_is(replace(inputs, advantage_N=worth_N), weight_N, is_cap=is_cap)",
           "return truncated_is(replace(inputs, advantage_N=worth_N), weight_N, is_cap=None)",
           ("learner/test_distillation.py",)),
    Defect("leaving-the-likeliest", "what leaves the likeliest tokens is not lost", "learner/objective/losses.py",
           ".sum(-1) + rest_N * (rest_N / other_N).log()",
           ".sum(-1) + 0 * other_N",
           ("learner/test_distillation.py",)),
    Defect("others-left-alone", "the gradient of a token's probability reaches the logits of all", "learner/model/logprobs.py",
           "grad_logp_CJ.sum(-1, keepdim=True)",
           "grad_logp_CJ[:, :1]",
           ("learner/test_logprobs.py",)),
    Defect("the-policy-moves-with-its-critic", "updates of the critic alone leave the policy", "learner/step/torch_machine.py",
           "        for p in self.policy.model.parameters():\n            p.grad = None\n",
           "        pass\n",
           ("learner/test_groups_of_one.py",)),
    Defect("failed-in-the-baseline", "a failed score moves no mean", "learner/objective/advantages.py",
           "mean = math.fsum(counting) / len(counting)\n    deviation",
           "mean = math.fsum(counting) / len(rewards)\n    deviation",
           ("learner/test_advantages.py",)),
    Defect("shifted-by-one", "each token is predicted by the position before it", "learner/batch/packing.py",
           "= np.arange(begin - 1, self.end)",
           "= np.arange(begin, self.end + 1)",
           ("learner/test_batch.py", "learner/test_policy.py")),
    Defect("another-images-cache", "prompts of equal text and other images share nothing", "actors/engine.py",
           "return self.prompt_ids, self.images",
           "return self.prompt_ids, ()",
           ("actors/test_torch_engine_images.py::test_equal_texts_with_other_images_share_nothing",)),
    Defect("no-turn-behind-images", "positions behind images are the model's own", "actors/torch_engine/images.py",
           "return positions + torch.from_numpy(",
           "return positions + 0 * torch.from_numpy(",
           ("actors/test_torch_engine_images.py::test_sampled_log_probabilities_are_those_of_plain_passes",)),
    Defect("features-of-older-weights", "the tower is read again when new weights change it", "actors/torch_engine/engine.py",
           "            self.tower.forget()\n",
           "            pass\n",
           ("actors/test_torch_engine_images.py::test_rows_go_on_behind_their_images_when_weights_change",)),
    Defect("images-read-as-text", "images that see themselves as a whole do so in the learner", "learner/batch/micro_batch.py",
           "(together_RL >= 0)",
           "(together_RL >= 9)",
           ("learner/test_images.py::test_log_probabilities_are_those_of_plain_passes",)),
    Defect("a-sampled-token-is-a-place", "a place of an image is in the prompt", "buffers/images/tower.py",
           "is_place[each.row, each.column : each.column + len(each.ids)] = own",
           "is_place[each.row] = self._places(ids_KT[each.row])",
           ("learner/test_images.py::test_a_sampled_token_of_an_image_is_a_token_as_any_other",)),
    Defect("discount-over-chains", "the length of one chain discounts nothing in another", "learner/objective/estimation.py",
           "whole if lengths is None else [*chain.from_iterable(lengths)]",
           "whole",
           ("learner/test_advantages.py",)),
    Defect("observations-trained-on", "observations bear no loss", "learner/batch/packing.py",
           "[rollout.sampled_ids for rollout in rollouts]",
           "[rollout.completion_ids[: rollout.num_tokens] for rollout in rollouts]",
           ("learner/test_batch.py",)),
    Defect("bound-not-looked-at", "a batch over the bound is refused before the gradient", "learner/loop/trainer.py",
           "self._safeguards.certify(groups, step)",
           "pass",
           ("learner/test_trainer.py::test_a_token_over_the_bound_is_refused_before_any_gradient",)),
    Defect("committed-before-durable", "groups are given up when a kept checkpoint holds them", "learner/loop/trainer.py",
           "self._paused_s = time.monotonic() - began\n        self._session.commit(self._writer.floor)",
           "self._paused_s = time.monotonic() - began\n        self._session.commit(self.step)",
           ("learner/test_trainer_faults.py",)),
    Defect("checkpoint-not-verified", "a checkpoint with other bytes than written is refused", "learner/checkpoint/store.py",
           "if contents and _digest(path) != expected:",
           "if not expected:",
           ("learner/test_learner_checkpoint.py",)),
    Defect("gradients-averaged", "two ranks make the step of one", "learner/step/ranks.py",
           "dist.all_reduce(flat)\n",
           "dist.all_reduce(flat.div_(self.size))\n",
           ("learner/test_ranks.py",)),
    # -- a run, and what is seen of it
    Defect("given-up-at-once", "a role that dies is started again", "async_rlhf/run/supervision/child.py",
           "return self.deaths >= max_deaths or (",
           "return self.deaths > 0 or (",
           ("async_rlhf/test_child.py",)),
    Defect("lock-not-inherited", "nothing begins beside a role of an earlier start", "async_rlhf/run/run_dir.py",
           "return LocalLauncher(self.lock, self.variables)",
           "return LocalLauncher(None, self.variables)",
           ("async_rlhf/test_run_lock.py::test_nothing_begins_beside_a_frozen_learner_of_a_killed_supervisor",)),
    Defect("another-image", "an image that does not have its digest is opened nowhere", "buffers/images/store.py",
           "if (found := digest_of(image)) != path.name:",
           "if (found := digest_of(image)) == \"\":",
           ("buffers/images/test_store.py",)),
    Defect("one-question-of-all-images", "equal text about another image is another prompt", "async_rlhf/run/checks/subject.py",
           'return "\\0".join((self.tokenizer.normal(text), *row.images))',
           "return self.tokenizer.normal(text)",
           ("async_rlhf/test_image_rows.py",)),
    Defect("too-many-runs", "no more runs of a queue live than may", "async_rlhf/serve/turns.py",
           "at_once - sum(entry.is_active for entry in now)",
           'at_once - sum(entry.state == "running" for entry in now)',
           ("serve/test_turns.py",)),
    Defect("completion-as-markup", "no text of a run is markup of a page", "async_rlhf/watch/document.py",
           """f"script-src {' '.join(_digest(text) for text in _texts(_PROGRAMS))}",""",
           """f"script-src 'unsafe-inline' {' '.join(_digest(text) for text in _texts(_PROGRAMS))}",""",
           ("watch/test_page_server.py",)),
    Defect("seed-of-the-attempt", "another attempt of a group draws the same numbers", "actors/loop/context.py",
           "rollout_seed(self.seed, number, member),",
           "rollout_seed(self.seed, number, member + attempt),",
           ("actors/test_worker.py",)),
    Defect("canary-that-is-no-number", "an engine that disagrees with the learner does not generate", "actors/loop/worker.py",
           "if not self._canary_drift <= self._canary_tolerance:",
           "if self._canary_drift > self._canary_tolerance:",
           ("actors/test_worker.py",)),
    Defect("named-before-durable", "a checkpoint that has its name is on disk", "learner/checkpoint/store.py",
           "for path in [*directory.rglob(\"*\"), directory]:",
           "for path in []:",
           ("learner/test_learner_checkpoint.py",)),
    Defect("filtered-counts-again", "a curriculum counts the outcome of a filtered group once", "buffers/curriculum.py",
           "            self._filtered.clear()",
           "            pass",
           ("buffers/hub/test_prompts_of_spools.py",)),
    Defect("acknowledged-though-full", "what is acknowledged is on disk, a filtered group too", "buffers/hub/exchange.py",
           "            self._pump()  # also after",
           "            self._full or self._pump()  # also after",
           ("buffers/hub/test_prompts_of_spools.py",)),
    Defect("markup-in-a-notebook", "what models and users' code say is shown as text", "async_rlhf/run/display/notebook.py",
           "<pre>{html.escape(text)}</pre>",
           "<pre>{text}</pre>",
           ("async_rlhf/test_status.py",)),
)
# fmt: on


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
        copy = Path(directory).resolve() / "tree"
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
        cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
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
    try:
        check(chosen)
    except ValueError as error:
        parser.error(str(error))
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
