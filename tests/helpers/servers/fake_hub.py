"""A hub of this process: the HTTP interface that the hub's own library speaks, kept in memory.

Repositories with commits, files small and large (LFS), and what a test has it refuse.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from helpers.servers.server_thread import answering

Files = dict[str, bytes]
TOKEN = "hf_ThisIsTheSecretOfATest"


@dataclass
class Repository:
    """Commits, the newest last, and whether strangers see them."""

    private: bool = False
    commits: list[tuple[str, Files]] = field(default_factory=list)

    def commit(self, files: Files) -> str:
        listed = repr(
            [len(self.commits), *sorted((name, hashlib.sha1(each).hexdigest()) for name, each in files.items())]
        )
        number = hashlib.sha1(listed.encode()).hexdigest()
        self.commits.append((number, files))
        return number

    def at(self, revision: str) -> tuple[str, Files] | None:
        if revision == "main":
            return self.commits[-1] if self.commits else ("0" * 40, {})
        return next((each for each in self.commits if each[0] == revision), None)


class Hub(ThreadingHTTPServer):
    """`fail`: (start of a path, status) that is answered in its place."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: Files = {}
        self.asked: list[tuple[str, str]] = []
        self.fail: tuple[str, int] | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, folder: Path) -> str:
        """A commit of a folder, whoever made it."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        return self.repositories.setdefault(name, Repository()).commit(files)

    def files(self, name: str) -> Files:
        """The newest files of a repository."""
        return self.repositories[name].commits[-1][1]

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for method, path in self.asked if "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_HEAD = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.asked.append((self.command, path))
            if self.server.fail is not None and path.startswith(self.server.fail[0]):
                self._answer(self.server.fail[1], b"refused by the test")
                return
            self._route(path.strip("/").split("/"), body)

    def _route(self, parts: list[str], body: bytes) -> None:
        if parts[0] == "datasets":  # data sets under names of their own
            self._route(parts[1:], body)
        elif parts[0] == "upload":
            self.server.objects[parts[1]] = body
            self._json({})
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:], body)
        elif len(parts) > 2 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[-2:] == ["objects", "batch"]:
            self._lfs(json.loads(body))
        else:
            self._answer(404, b"Not found")

    @property
    def _trusted(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _create(self, asked: dict[str, Any]) -> None:
        if not self._trusted:
            self._answer(401, b"Invalid credentials")
            return
        name = f"{asked['organization']}/{asked['name']}"
        self.server.repositories[name] = Repository(bool(asked.get("private") or asked.get("visibility") == "private"))
        self._json({"url": f"{self.server.url}/{name}", "name": name})

    def _found(self, name: str) -> Repository | None:
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._trusted):
            self._answer(404, b"Repository not found", **{"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def _api(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self._found(name)
        if repository is None:
            return
        if rest[:1] == ["preupload"]:
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in asked
            ]
            self._json({"files": modes})
        elif rest[:1] == ["commit"]:
            self._commit(repository, name, body)
        else:
            self._info(repository, name, rest)

    def _info(self, repository: Repository, name: str, rest: list[str]) -> None:
        found = repository.at(rest[1] if len(rest) > 1 else "main")
        if found is None:
            self._answer(404, b"Revision not found", **{"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        if rest[:1] == ["tree"]:
            self._json([self._entry(path, content) for path, content in files.items()])
            return
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": name, "modelId": name, "sha": commit, "private": repository.private, "siblings": siblings})

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        if not self._trusted:
            self._answer(403, b"Forbidden")
            return
        files = dict(repository.commits[-1][1]) if repository.commits else {}
        for line in body.splitlines():
            each = json.loads(line)
            value = each["value"]
            if each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif each["key"] == "deletedFile":
                del files[value["path"]]
        number = repository.commit(files)
        self._json({"success": True, "commitOid": number, "commitUrl": f"{self.server.url}/{name}/commit/{number}"})

    def _lfs(self, asked: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/upload/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._found(name)
        found = None if repository is None else repository.at(revision)
        if repository is None:
            return
        if found is None or path not in found[1]:
            self._answer(404, b"Entry not found", **{"X-Error-Code": "EntryNotFound"})
            return
        content = found[1][path]
        self._answer(200, content, **{"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": found[0]})

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    with answering(Hub()) as hub:
        yield hub


def use(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, *, token: bool = True) -> None:
    """The library's own client asks `hub`, with a cache of its own, as it would with these variables in its environment."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # its storage is another service
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
