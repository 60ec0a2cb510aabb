"""A Weights & Biases server on loopback, as far as a client that sends a run speaks to it."""

from __future__ import annotations

import gzip
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

KEY = "0123456789abcdef" * 2 + "01234567"


class Server:
    """What was sent: by run, its lines of history as they stand, and what was said of it when it was made."""

    def __init__(self) -> None:
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.keys: set[str] = set()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def query(self, name: str, v: dict[str, Any]) -> dict[str, Any]:
        if name == "UpsertBucket":
            told = self.runs.setdefault(v["name"], {})
            told.update({key: value for key, value in v.items() if value is not None})
            project = {"id": "p", "name": v["project"], "entity": {"id": "e", "name": "team"}}
            bucket = {
                "id": f"id-{v['name']}",
                "name": v["name"],
                "config": v["config"],
                "project": project,
                "historyLineCount": 0,
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "RunResumeStatus":
            return {
                "model": {
                    "id": "p",
                    "name": v["project"],
                    "entity": {"id": "e", "name": "team"},
                    "bucket": self._known(v["name"]),
                }
            }
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/up/{file}"} for file in v["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if name == "Viewer":
            return {"viewer": {"id": "u", "entity": "team", "username": "u", "flags": "{}", "teams": {"edges": []}}}
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        return {}

    def _known(self, run: str) -> dict[str, Any] | None:
        """What a client that resumes is told of a run: how many lines it has, and the last."""
        if run not in self.runs:
            return None
        lines = self.history.get(run, [])
        tail = json.dumps([json.dumps(line) for line in lines[-1:]])
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        texts = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}', "eventsTail": "[]", "historyTail": tail}
        return {"id": f"id-{run}", "name": run, "displayName": None, "sweepName": None, "tags": [], **counts, **texts}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """Lines have numbers, and one sent again takes the place of the one before."""
        part = sent.get("files", {}).get("wandb-history.jsonl")
        if part is not None:
            lines = self.history.setdefault(run, [])
            lines[part["offset"] : part["offset"] + len(part["content"])] = [json.loads(line) for line in part["content"]]

    def config(self, run: str) -> dict[str, Any]:
        told = json.loads(self.runs[run]["config"])
        return {name: entry["value"] for name, entry in told.items() if name != "_wandb"}


def _handler(server: Server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionError):  # of a client that was ended
                super().handle()

        def _answer(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            server.keys.add(self.headers.get("Authorization", ""))
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                name = asked["query"].split("(")[0].split("{")[0].split()[-1]
                self._answer({"data": server.query(name, asked.get("variables") or {})})
            elif self.path.endswith("/file_stream"):
                server.stream(self.path.split("/")[-2], json.loads(body))
                self._answer({})
            else:
                self._answer({})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer({})

        def do_GET(self) -> None:
            self._answer({})

        def log_message(self, *_: object) -> None: ...

    return Handler


@contextmanager
def unreachable(how: str) -> Iterator[str]:
    """The address of a server that ``refuses`` connections, or takes them and is ``silent`` for ever."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if how == "silent":
            listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
