"""A stand-in for the Hugging Face Hub on this machine: what of its API makes, fills and reads a repository, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType
from typing import Any

TOKEN = "hf_" + "a1B2" * 8


class Hub:
    """Repositories by name (`datasets/owner/name` for data sets), each a commit after another: what files it has."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.uploaded: dict[str, bytes] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to take it for the Hub."""
        return {"HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    @staticmethod
    def commit_id(repository: str, number: int) -> str:
        return hashlib.sha1(f"{repository} {number}".encode()).hexdigest()

    def add(self, repository: str, files: dict[str, bytes]) -> str:
        commits = self.commits.setdefault(repository, [])
        commits.append({**(commits[-1] if commits else {}), **files})
        return self.commit_id(repository, len(commits))


class Answering(BaseHTTPRequestHandler):
    """Of a server of a test: it writes no log."""

    def log_message(self, *_: Any) -> None: ...

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(handler: type[Answering]) -> Iterator[str]:
    """The address of a server of this machine that answers so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(timeout=10)


@contextmanager
def hub() -> Iterator[Hub]:
    class Handler(Answering):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            made.requests.append(f"{self.command} {self.path}")
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", self.path):
                return self._info(found[1])
            found = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
            commits = made.commits.get(found[1], []) if found else []
            known = {made.commit_id(found[1], n): files for n, files in enumerate(commits, 1)} if found else {}
            known |= {"main": commits[-1]} if commits else {}
            if found is None or found[3] not in known.get(found[2], {}):
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})
            content = known[found[2]][found[3]]
            commit = found[2] if found[2] != "main" else made.commit_id(found[1], len(commits))
            self.answer(200, content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def do_PUT(self) -> None:
            made.uploaded[self.path.rpartition("/")[2]] = self.body()
            self.answer(200, b"", {"ETag": '"x"'})

        def do_POST(self) -> None:
            made.requests.append(f"{self.command} {self.path}")
            body = self.body()
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.answer(401, b"", {"X-Error-Message": "Invalid username or password."})
            if self.path == "/api/repos/create":
                given = json.loads(body)
                name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
                made.commits[name], made.private[name] = [], bool(given.get("private") or given.get("visibility") == "private")
                return self._json({"url": f"{made.address}/{name}"})
            if found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
                modes = ((each["path"], each["path"].endswith((".safetensors", ".png"))) for each in json.loads(body)["files"])
                files = [
                    {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False} for path, large in modes
                ]
                return self._json({"files": files})
            if self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**each, "actions": {"upload": {"href": f"{made.address}/lfs/{each['oid']}", "header": {}}}}
                    for each in json.loads(body)["objects"]
                ]
                return self._json({"transfer": "basic", "objects": objects})
            if self.path == "/api/validate-yaml":
                return self._json({"errors": [], "warnings": []})
            found = re.fullmatch(r"/api/models/(.+)/commit/main", self.path)
            assert found, self.path
            lines = [json.loads(line) for line in body.splitlines()]
            files = {}
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    made.messages.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    files[value["path"]] = made.uploaded[value["oid"]]
            commit = made.add(found[1], files)
            self._json({"success": True, "commitOid": commit, "commitUrl": f"{made.address}/{found[1]}/commit/{commit}"})

        def _info(self, name: str) -> None:
            if name not in made.commits:
                return self.answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            files = [
                {"rfilename": file} for file in (".gitattributes", *(made.commits[name][-1] if made.commits[name] else {}))
            ]
            self._json({"id": name, "private": made.private.get(name, False), "siblings": files, "tags": []})

        def _json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    with serving(Handler) as address:
        made = Hub(address)
        yield made
