"""Key files of a run, whom to let in, and what the holder of a key may send. No sockets, and no secret is ever shown in a text.

A key directory belongs to one machine. The machine of the hub has all of these, every other one the first two:

    hub.public           the hub's public key: a peer that holds it cannot be fooled by another hub
    peer.secret          this machine's own key, mode 0600
    hub.secret           the hub's own key, mode 0600
    allowed/NAME.public  whom the hub lets in: the public key of the machine NAME; in the second line what it may be
    for-NAME/            the directory of the machine NAME, to be moved there

Keys are CURVE keys (Curve25519, 32 bytes) written in Z85 (ZeroMQ RFC 32, 40 characters). Read by `link` and `hub` when a
process starts, and the list again when it changes; checked by the configuration before any process starts. A machine may be

    actor      makes groups, under its machine's name: NAME or NAME-anything
    relay      the same for others, so under any name
    learner    registers, takes batches, publishes weights
    control    requests the status, drains, halts, takes groups back

A stolen key is worth its role and nothing more. Without keys only this machine connects, and roles are not checked.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import zmq
from zmq.utils import z85

from async_rlhf.buffers.errors import ConfigError, RefusedError, did_you_mean
from async_rlhf.buffers.protocol import broadcasts, wire

Role = Literal["actor", "relay", "learner", "control"]
ROLES: tuple[Role, ...] = get_args(Role)
_OF_ACTORS = (wire.Hello, wire.Beat, wire.Put, wire.Release, wire.Bye, wire.Fetch, wire.FetchChunk)
_OF_THE_LEARNER = (
    *(wire.Register, wire.Take, wire.Tried, wire.Trained, wire.Commit),
    *(wire.SealedPart, wire.Publish, wire.Chunk, wire.Check),
    *(broadcasts.Gather, broadcasts.Broadcast),
)
_OF_CONTROL = (wire.GetStatus, wire.Drain, wire.Gone, wire.Quarantine, wire.Halt)
_SENDERS: dict[type[wire.Message], tuple[Role, ...]] = {
    **dict.fromkeys(_OF_ACTORS, ("actor", "relay")),
    **dict.fromkeys(_OF_THE_LEARNER, ("learner",)),
    **dict.fromkeys(_OF_CONTROL, ("control",)),
}

LOCAL = "local"
"""The name of the hub's own machine in the list of those allowed."""
ZAP_DOMAIN = b"async-rlhf"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MAKE = "make a directory with: async-rlhf keys new DIR"


@dataclass(frozen=True)
class KeyHolder:
    """The holder of a key, and the allowed roles."""

    name: str
    roles: frozenset[Role]


@dataclass(frozen=True)
class PeerKeys:
    """A peer's own keys and the hub's public key, in Z85."""

    hub_public: bytes
    secret: bytes = field(repr=False)

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Let this socket, not yet connected, speak to the hub alone."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.hub_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


@dataclass(frozen=True)
class HubKeys:
    """The hub's secret key in Z85, and the 32 bytes of every public key that it lets in, with its holder."""

    directory: Path
    secret: bytes = field(repr=False)
    allowed: Mapping[bytes, KeyHolder]

    def listing(self) -> list[tuple[str, int, int]]:
        """Changes with the list: of each entry its name, inode and time of change. Raises OSError."""
        with os.scandir(self.directory / "allowed") as entries:
            return sorted((entry.name, (found := entry.stat()).st_ino, found.st_mtime_ns) for entry in entries)

    def reread(self) -> tuple[HubKeys, str]:
        """The keys with the list as it is now, and the list's problem. A list that cannot be read admits no new key; a key
        without an entry is refused in any case."""
        try:
            return load_hub(self.directory), ""
        except ConfigError as error:
            left = {key: holder for key, holder in self.allowed.items() if _entry(self.directory, holder.name).exists()}
            return HubKeys(self.directory, self.secret, left), str(error)


def create(directory: Path, peers: Sequence[str], new_pair: Callable[[], tuple[bytes, bytes]]) -> None:
    """Make the directory of the hub's machine, and within it one for every other machine.

    peers: each NAME, a machine of actors, or NAME:ROLE,... (see above). new_pair: makes a (public, secret) key pair in Z85.
    Raises ConfigError when there is something already.
    """
    holders = [KeyHolder(LOCAL, frozenset(ROLES)), *map(_peer, peers)]
    _check_names(holders)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"{str(directory)!r} is not empty: keys are never written over. Name a new directory")
        directory.chmod(0o700)
        (directory / "allowed").mkdir(mode=0o700)
        hub_public, hub_secret = new_pair()
        _write(directory / "hub.secret", hub_secret)
        for holder in holders:
            _add(directory, holder, hub_public, new_pair)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {str(directory)!r}: {error}") from error


def provide(directory: Path, names: Sequence[str], new_pair: Callable[[], tuple[bytes, bytes]]) -> None:
    """Keys for these machines, as in `create`, where the hub's directory has none.

    The directory is made where there is none. Raises ConfigError.
    """
    if not directory.exists():
        create(directory, names, new_pair)
    else:
        add(directory, [each for each in names if not (directory / f"for-{_peer(each).name}").is_dir()], new_pair)


def add(directory: Path, peers: Sequence[str], new_pair: Callable[[], tuple[bytes, bytes]]) -> None:
    """Keys for further machines, as in `create`; a hub that runs lets them in within a second. Raises ConfigError."""
    known, new = load_hub(directory).allowed.values(), [_peer(each) for each in peers]
    _check_names([*known, *new])
    try:
        for holder in new:
            _add(directory, holder, _read(directory / "hub.public"), new_pair)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {str(directory)!r}: {error}") from error


def revoke(directory: Path, names: Sequence[str]) -> None:
    """Take the right of these machines away; a hub that runs cuts their connections within a second. Raises ConfigError."""
    known = [holder.name for holder in load_hub(directory).allowed.values() if holder.name != LOCAL]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{name!r} is no machine that {str(directory / 'allowed')!r} lets in; {did_you_mean(name, known)}"
            )
    try:
        for name in names:
            _entry(directory, name).unlink()
            shutil.rmtree(directory / f"for-{name}", ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"keys cannot be removed from {str(directory)!r}: {error}") from error


def _add(directory: Path, holder: KeyHolder, hub_public: bytes, new_pair: Callable[[], tuple[bytes, bytes]]) -> None:
    folder = directory if holder.name == LOCAL else directory / f"for-{holder.name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    public, secret = new_pair()
    _write(folder / "hub.public", hub_public)
    _write(folder / "peer.secret", secret)
    roles = " ".join(sorted(holder.roles)).encode()
    _write(_entry(directory, holder.name), public + b"\n" + roles)


def load_peer(directory: Path) -> PeerKeys:
    """Raises ConfigError for a directory that is incomplete, or that others could read or change."""
    _check_directory(directory)
    return PeerKeys(hub_public=_read(directory / "hub.public"), secret=_read(directory / "peer.secret"))


def load_hub(directory: Path) -> HubKeys:
    """Raises ConfigError for a directory that is incomplete, or that others could read or change."""
    _check_directory(directory)
    _check_directory(directory / "allowed")
    files = sorted((directory / "allowed").glob("*.public"))
    if not files:
        raise ConfigError(f"{str(directory / 'allowed')!r} holds no *.public: the hub would refuse every peer; {_MAKE}")
    allowed = dict(map(_read_entry, files))
    if len(allowed) < len(files):
        raise ConfigError(f"{str(directory / 'allowed')!r}: one key stands in two files; who holds it must be one")
    _check_names(list(allowed.values()))
    return HubKeys(directory, secret=_read(directory / "hub.secret"), allowed=allowed)


def admit(request: Sequence[bytes], allowed: Mapping[bytes, KeyHolder]) -> tuple[list[bytes], str]:
    """The answer to a question of ZeroMQ's authentication protocol (ZAP, RFC 27), and whom it refuses ("" when let in).

    Only CURVE with an allowed public key is let in, and its messages come with that key, in hexadecimal; whatever else comes,
    and what cannot be understood, is not.
    """
    version, number, domain, address, _, mechanism, *credentials = [*request, *[b""] * (7 - len(request))]
    key = credentials[0] if len(credentials) == 1 else b""
    if version == b"1.0" and domain == ZAP_DOMAIN and mechanism == b"CURVE" and key in allowed:
        return [b"1.0", number, b"200", b"OK", key.hex().encode(), b""], ""
    return [b"1.0", number, b"400", b"not allowed", b"", b""], address.decode("ascii", "replace")[:100] or "unknown"


def roles_of(words: Iterable[str], where: str) -> frozenset[Role]:
    """The roles of these words; raises ConfigError, beginning with `where`, for none or another."""
    wanted = set(words)
    roles = frozenset(role for role in ROLES if role in wanted)
    if not roles or len(roles) != len(wanted):
        given = " ".join(sorted(wanted)) or "none"
        raise ConfigError(f"{where}: roles = {given}; give one or more of {', '.join(ROLES)}")
    return roles


def check_sender(holder: KeyHolder | None, message: wire.Message) -> None:
    """Raise RefusedError with the reason `role` for a message that this holder may not send."""
    if holder is None:
        return
    needed = _SENDERS.get(type(message))
    if needed is not None and holder.roles.isdisjoint(needed):
        raise RefusedError(
            "role",
            f"{message.type!r} is for {' or '.join(needed)}, and the key of {holder.name!r} is allowed as "
            f"{', '.join(sorted(holder.roles))} (second line of allowed/{holder.name}.public)",
        )
    if isinstance(message, wire.Hello) and "relay" not in holder.roles and not is_actor_of(holder.name, message.actor):
        raise RefusedError(
            "role", f"an actor of {holder.name!r} is called {holder.name} or {holder.name}-..., not {message.actor[:40]!r}"
        )


def is_actor_of(machine: str, actor: str) -> bool:
    """Whether an actor of this machine may have this name."""
    return actor == machine or actor.startswith(f"{machine}-")


def _entry(directory: Path, name: str) -> Path:
    return directory / "allowed" / f"{name}.public"


def _peer(text: str) -> KeyHolder:
    name, colon, roles = text.partition(":")
    return KeyHolder(name, roles_of(roles.split(",") if colon else ["actor"], f"name {text!r}"))


def _check_names(holders: Sequence[KeyHolder]) -> None:
    """Every name once, and no machine called like an actor of another."""
    names = [holder.name for holder in holders]
    for i, name in enumerate(names):
        if not _NAME.fullmatch(name) or name in names[:i]:
            raise ConfigError(f"name {name!r}: every machine needs another name of letters, digits, '.', '_', '-', not 'local'")
        for other in names:
            if other != name and is_actor_of(other, name):
                raise ConfigError(f"name {name!r}: actors of the machine {other!r} may be called so; choose another")


def _read_entry(path: Path) -> tuple[bytes, KeyHolder]:
    """The 32 bytes of an allowed key, and its holder."""
    text, *rest = _lines(path)
    return _bytes(_checked(text, path)), KeyHolder(
        path.stem, roles_of(b" ".join(rest).decode("ascii", "replace").split(), f"{path}")
    )


def _write(path: Path, key: bytes) -> None:
    mode = 0o600 if path.suffix == ".secret" else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")


def _read(path: Path) -> bytes:
    """The key in this file, in Z85. Errors name the file and never what is in it."""
    return _checked(b"\n".join(_lines(path)), path)


def _lines(path: Path) -> list[bytes]:
    """The lines of a key file whose mode is safe; at least one, perhaps empty."""
    try:
        mode, text = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key {str(path)!r} cannot be read: {error.strerror}; {_MAKE}") from error
    if path.suffix == ".secret" and mode & 0o077:
        raise ConfigError(f"key {str(path)!r} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
    if mode & 0o022:
        raise ConfigError(f"key {str(path)!r} can be changed by others (mode {mode & 0o777:o}): chmod 644 {path}")
    return text.splitlines() or [b""]


def _checked(text: bytes, path: Path) -> bytes:
    try:
        _bytes(text)
    except ValueError as error:
        raise ConfigError(f"key {str(path)!r} is damaged: it is not 40 characters of Z85; {_MAKE}") from error
    return text


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"security.keys: {str(directory)!r} is no directory; {_MAKE}")
    if (mode := directory.stat().st_mode) & 0o022:
        raise ConfigError(f"{str(directory)!r} can be changed by others (mode {mode & 0o777:o}): chmod 700 {directory}")


def _bytes(key: bytes) -> bytes:
    """The 32 bytes of a key in Z85; raises ValueError for any other text."""
    if len(key) != 40:
        raise ValueError("length")
    try:
        return z85.decode(key)
    except (KeyError, struct.error) as error:
        raise ValueError("character or range") from error
