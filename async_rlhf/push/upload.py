"""`async-rlhf push`: a checkpoint becomes one commit in a repository of the Hugging Face Hub.

`HF_TOKEN`, `HF_HOME` and `HF_ENDPOINT` mean what they do for huggingface_hub. What goes out is searched for secrets before
anything is contacted.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from httpx2 import Client, HTTPError, Response, SyncByteStream, Timeout

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.inspect.plot import draw
from async_rlhf.learner.checkpoint.evaluated import without_links
from async_rlhf.learner.checkpoint.store import complete, step_of, verified
from async_rlhf.push.card import card
from async_rlhf.run.config_keys import LIKE_A_SECRET
from async_rlhf.run.manifest import published
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, no_run

Files = Mapping[str, Path | bytes]
"""The repository's files by name."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KEY = re.compile(
    rb"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[opsu]_[A-Za-z0-9]{36}|\bAKIA[A-Z0-9]{16}\b|-----BEGIN [A-Z ]*PRIVATE"
)
_SHORTEST_SECRET = 8
_ANSWER_S, _ANSWER_BYTES = 60.0, 64 << 20
_WEIGHTS, _HEAD_BYTES = ".safetensors", 1 << 20  # of weights only the beginning is text


class How(NamedTuple):
    private: bool = False
    """A repository that is made can be read by its owner alone."""
    adapter: bool = False
    """The adapter alone."""
    update: bool = False
    """Add a commit to a repository with content."""
    dry_run: bool = False
    """Nothing is contacted."""


def push(target: Path, name: str, how: How, say: Callable[[str], None]) -> None:
    """target: a run directory, whose newest checkpoint it is, or a checkpoint.

    Raises ConfigError before anything is contacted, DamagedError, and AsyncRLHFError for what the Hub refuses.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a repository name; give OWNER/NAME of letters, digits, '.', '_' and '-'")
    run, checkpoint = _found(target)
    verified(checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        files, reading = _files(run, checkpoint, how.adapter), Reading(run)
        try:
            draw([reading], picture := Path(scratch) / "plot.png")
            files["plot.png"] = picture
        except ConfigError as error:
            say(f"without a picture: {error}")
        text = card(reading, checkpoint, name, is_adapter=how.adapter, has_picture="plot.png" in files)
        files["README.md"] = text.encode()
        check_clean(run, files)
        if not how.dry_run:
            say(_send(name, files, f"Step {step_of(checkpoint)} of run {run.path.resolve().name}", how))
            return
        sizes = {file: len(each) if isinstance(each, bytes) else each.stat().st_size for file, each in files.items()}
    say("\n".join([text, *(f"{size:>15,} bytes  {file}" for file, size in sizes.items()), "nothing was sent (--dry-run)"]))


def _found(target: Path) -> tuple[RunDir, Path]:
    """The run and the checkpoint that a path names. Raises ConfigError."""
    path = without_links(target.absolute()).resolve()
    if (path / "config.toml").is_file():
        if not (made := complete(path / "checkpoints")):
            raise ConfigError(f"run {str(target)!r} has no checkpoint yet: one is made every checkpoint.save_every steps")
        return RunDir.existing(target), made[-1]
    path = path.parent if path.name in ("model", "adapter") else path
    if path not in complete(path.parent):
        raise ConfigError(f"{no_run(target)}, and no checkpoint of one (RUN/checkpoints/best)")
    return RunDir.existing(path.parent.parent), path


def _files(run: RunDir, checkpoint: Path, adapter: bool) -> dict[str, Path | bytes]:
    """The model, or the adapter with the name of its base, and the tokenizer. Raises ConfigError."""
    model = {path.name: path for path in sorted((checkpoint / "model").glob("[!.]*")) if path.is_file()}
    if not adapter:
        return dict(model)
    base, config = published(run.config().model), checkpoint / "adapter" / "adapter_config.json"
    if not (config.is_file() and base.commit):
        why = "its base model is not on the Hub" if config.is_file() else "learner.lora.rank = 0"
        raise ConfigError(f"--adapter: others cannot use the adapter of run {str(run.path)!r} ({why}); leave the option out")
    named = {**json.loads(config.read_text()), "base_model_name_or_path": base.name, "revision": base.commit}
    tokenizer = {file: path for file, path in model.items() if "token" in file or path.suffix == ".jinja"}
    return {**tokenizer, "adapter_model.safetensors": config.with_name("adapter_model.safetensors"),
            config.name: json.dumps(named, indent=2).encode()}  # fmt: skip


def check_clean(run: RunDir, files: Files) -> None:
    """Raise ConfigError for a file with a key, a path of this machine, or a secret of the environment."""
    hidden = {f"the value of ${key}": text for key, text in os.environ.items()
              if LIKE_A_SECRET.search(key) and len(text) >= _SHORTEST_SECRET}  # fmt: skip
    hidden |= {f"the path {path}": f"{path}/" for path in {run.path.resolve(), Path.home()} - {Path("/")}}
    for file, content in files.items():
        if isinstance(content, Path):
            with content.open("rb") as opened:
                content = opened.read(_HEAD_BYTES if content.suffix == _WEIGHTS else -1)
        what = "a key" if _KEY.search(content) else next((each for each in hidden if hidden[each].encode() in content), None)
        if what is not None:
            raise ConfigError(f"{file} would hold {what}, so nothing is sent; take it out of the run's files")


def _send(name: str, files: Files, message: str, how: How) -> str:
    """Send the files; returns their address. Raises ConfigError, and AsyncRLHFError when the Hub refuses them."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_session, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if get_token() is None:
        raise ConfigError("there is no token for the Hugging Face Hub: hf auth login, or set HF_TOKEN")
    _bound(get_session())
    hub = HfApi(library_name="async-rlhf")
    try:
        try:
            there = hub.model_info(name, timeout=_ANSWER_S)
            others = sorted({each.rfilename for each in there.siblings or ()} - {".gitattributes"})
        except RepositoryNotFoundError:
            hub.create_repo(name, private=how.private)
        else:
            if others and not how.update:
                shown = ", ".join(others[:3])
                raise ConfigError(f"{name} exists with other content ({shown}); choose another name, or add to it: --update")
            if how.private and not there.private:
                raise ConfigError(f"{name} exists and is public; make it private there first, or leave --private out")
        added = [CommitOperationAdd(file, each if isinstance(each, bytes) else str(each)) for file, each in files.items()]
        made = hub.create_commit(name, added, commit_message=message)
    except ConfigError:
        raise
    except (LookupError, TypeError, AttributeError) as error:
        raise AsyncRLHFError(f"{name} is not pushed: {hub.endpoint} answers what no Hub does ({error!r})") from error
    except (OSError, ValueError, RuntimeError, HTTPError) as error:  # whatever huggingface_hub and hf_xet raise is one of these
        why = " ".join(str(each).strip().splitlines()[0] for each in (error, error.__cause__) if each)
        raise AsyncRLHFError(f"{name} is not pushed: {why}") from error
    return f"{made.repo_url} has {len(files)} files at commit {made.oid}"


def _bound(client: Client) -> None:
    """Limit the time and the size of the Hub's answers: none of those used here is a file."""
    client.timeout = Timeout(_ANSWER_S)
    client.event_hooks = {**client.event_hooks, "response": [_bound_answer]}


def _bound_answer(response: Response) -> None:
    assert isinstance(response.stream, SyncByteStream)
    response.stream = _Bounded(response.stream, str(response.url))


class _Bounded(SyncByteStream):
    def __init__(self, stream: SyncByteStream, url: str) -> None:
        self._stream, self._url = stream, url

    def __iter__(self) -> Iterator[bytes]:
        """Raises OSError."""
        began, size = time.monotonic(), 0
        for part in self._stream:
            size += len(part)
            if size > _ANSWER_BYTES or time.monotonic() - began > _ANSWER_S:
                raise OSError(f"{self._url} answers with more than {_ANSWER_BYTES >> 20} MiB, or for more than {_ANSWER_S:g} s")
            yield part

    def close(self) -> None:
        self._stream.close()
