"""A Hub on this machine that answers the requests of an upload and a download."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

COMMIT = "1" * 40


class _Hub(http.server.BaseHTTPRequestHandler):
    """A repository whose files are those of a folder."""

    folder: Path

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            return self._say(
                {"url": f"http://{self.headers['Host']}/org/name", "name": json.loads(body)["name"]}
            )
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._say({"files": modes})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    (self.folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            return self._say(
                {"commitUrl": f"http://{self.headers['Host']}/org/name/commit/{COMMIT}", "commitOid": COMMIT}
            )
        return self._say({}, 404)

    def do_GET(self) -> None:
        if "/revision/" in self.path or self.path.partition("?")[0] == "/api/models/org/name":
            names = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
            return self._say({"id": "org/name", "sha": COMMIT, "siblings": names})
        if "/tree/" in self.path:
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)}
                for path in sorted(self.folder.iterdir())
            ]
            return self._say(files)
        return self._file(with_content=True)

    def do_HEAD(self) -> None:
        self._file(with_content=False)

    def _file(self, with_content: bool) -> None:
        path = self.folder / unquote(self.path.rpartition("/")[2])
        if not path.is_file():
            return self._say({}, 404)
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_digest(path)}"')
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        if with_content:
            self.wfile.write(path.read_bytes())
        return None

    def _say(self, answer: object, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def local_hub(folder: Path) -> Iterator[str]:
    """Serve a folder as the repository org/name, and yield the URL of the Hub."""
    folder.mkdir()
    handler = type("Hub", (_Hub,), {"folder": folder})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
