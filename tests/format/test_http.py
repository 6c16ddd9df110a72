"""HTTP servers that misbehave: every call ends soon, in an error of ckptz or the OS, and writes no output."""

import gzip
import http.server
import io
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptz import inspect, restore, verify
from ckptz.errors import CkptzError
from ckptz.format import byte_source
from ckptz.numpy import load_file, save_file
from tests.support.cli_support import ckptz

Handler = http.server.BaseHTTPRequestHandler


def _send(handler: Handler, code: int, body: bytes = b"", **headers: object) -> None:
    """Send a response; a header that is None is left out, `_` in its name stands for `-`."""
    handler.send_response(code)
    overrides = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Content-Length": len(body), **overrides}.items():
        if value is not None:
            handler.send_header(name, str(value))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _send_range(handler: Handler, data: bytes, **headers: object) -> None:
    """Send the requested range of `data` with code 206, or all of it with code 200."""
    if "Range" not in handler.headers:
        _send(handler, 200, data, **{"Accept-Ranges": "bytes", **headers})
        return
    begin, _, end = handler.headers["Range"].removeprefix("bytes=").partition("-")
    first, last = int(begin or 0), min(int(end or len(data) - 1), len(data) - 1)
    _send(
        handler,
        206,
        data[first : last + 1],
        **{"Content-Range": f"bytes {first}-{last}/{len(data)}", **headers},
    )


def _stall(handler: Handler, data: bytes, n: int) -> None:
    """Send `n` bytes of the body, and then nothing for 1.5 s."""
    _send(handler, 200, b"", Content_Length=len(data))
    if handler.command != "HEAD":
        handler.wfile.write(data[:n])
        handler.wfile.flush()
        time.sleep(1.5)


def _trickle(handler: Handler, data: bytes, send: Callable[[Handler, bytes], None]) -> None:
    """Send the body at 10 bytes/s: below the minimum rate, but without a long pause."""
    response = io.BytesIO()
    handler.wfile, connection = response, handler.wfile
    send(handler, data)
    handler.wfile = connection
    head, separator, body = response.getvalue().partition(b"\r\n\r\n")
    connection.write(head + separator)
    for i in range(len(body)):
        connection.write(body[i : i + 1])
        time.sleep(0.1)


def _endless(handler: Handler, data: bytes) -> None:
    _send(handler, 200, b"", Content_Length=None)
    while handler.command != "HEAD":  # until the client closes the connection
        handler.wfile.write(bytes(1 << 20))


def _chunked(handler: Handler, chunks: list[bytes], end: bytes) -> None:
    _send(handler, 200, b"", Content_Length=None, Transfer_Encoding="chunked")
    if handler.command != "HEAD":
        handler.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end)
        handler.close_connection = True


BEHAVIOURS: dict[str, Callable[[Handler, bytes], None]] = {
    **{str(code): lambda h, d, code=code: _send(h, code) for code in (301, 400, 401, 403, 404, 410, 418)},
    **{str(code): lambda h, d, code=code: _send(h, code, b"sorry") for code in (429, 500, 502, 503, 504)},
    "416 to ranges": lambda h, d: _send(h, 416) if "Range" in h.headers else _send_range(h, d),
    "500 to ranges": lambda h, d: _send(h, 500) if "Range" in h.headers else _send_range(h, d),
    "redirect to itself": lambda h, d: _send(h, 302, Location=h.path),
    "redirect to a closed port": lambda h, d: _send(h, 302, Location="http://127.0.0.1:9/nobody"),
    "longer than Content-Length": lambda h, d: _send(h, 200, d, Content_Length=len(d) - 9),
    "shorter than Content-Length": lambda h, d: _send(h, 200, d[:-9], Content_Length=len(d)),
    "part of a range": lambda h, d: _send(h, 206, d[:3]) if "Range" in h.headers else _send_range(h, d),
    "another range": lambda h, d: _send_range(h, d, Content_Range=f"bytes 5-9/{len(d)}"),
    "no length": lambda h, d: _send(h, 200, d[: len(d) // 2], Content_Length=None),
    "an HTML page": lambda h, d: _send(h, 200, b"<html>log in</html>"),
    "an empty body": lambda h, d: _send(h, 200),
    "gzip": lambda h, d: _send(h, 200, gzip.compress(d), Content_Encoding="gzip"),
    "stalled": lambda h, d: _stall(h, d, 5),
    "stalled at once": lambda h, d: _stall(h, d, 0),
    "trickling": lambda h, d: _trickle(h, d, lambda h, d: _send(h, 200, d)),
    "trickling ranges": lambda h, d: _trickle(h, d, _send_range),
    "endless": _endless,
    "a huge length": lambda h, d: _send(h, 200, d, Content_Length=1 << 50),
    "a huge length to ranges": lambda h, d: _send_range(h, d, Content_Range=f"bytes 0-{len(d)}/{1 << 50}"),
    "a length that is no number": lambda h, d: _send(h, 200, d, Content_Length="many"),
    "a negative length": lambda h, d: _send(h, 200, d, Content_Length=-5),
    "the whole file to each range": lambda h, d: _send(h, 200, d, Accept_Ranges="bytes"),
    "no HEAD": lambda h, d: _send(h, 405) if h.command == "HEAD" else _send_range(h, d),
    "another length to HEAD": lambda h, d: (
        _send(h, 200, b"", Content_Length=7) if h.command == "HEAD" else _send_range(h, d)
    ),
    "chunks without an end": lambda h, d: _chunked(h, [d[:99]], b""),
    "an invalid chunk length": lambda h, d: _chunked(h, [d[:99]], b"zz\r\n"),
    "chunks": lambda h, d: _chunked(h, [d[i : i + 999] for i in range(0, len(d), 999)], b"0\r\n\r\n"),
    "first half of the file": lambda h, d: _send_range(h, d[: len(d) // 2]),
    "reversed bytes": lambda h, d: _send_range(h, d[::-1]),
    "no status line": lambda h, d: h.wfile.write(b"\x00\xff nonsense\r\n\r\n") and None,
    "closes the connection": lambda h, d: h.connection.close(),
    "ranges": _send_range,
    "no ranges": lambda h, d: _send(h, 200, d),
}
# Calls succeed with these servers: the client need not rely on what they do wrong.
WORK = {"ranges", "no ranges", "gzip", "chunks", "no HEAD", "another range"}
WORK |= {"the whole file to each range", "a huge length to ranges"}
# Only these servers need a short timeout to end; it could fail the others on a busy machine.
SLOW = {"stalled", "stalled at once", "trickling", "trickling ranges", "another range"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a `.ckptz` file of 40 000 float64 values, about 300 kB."""
    path = tmp_path_factory.mktemp("served") / "x.ckptz"
    save_file({"x": np.random.default_rng(0).standard_normal(40_000)}, path)
    return path.read_bytes()


@pytest.fixture
def served(request: pytest.FixtureRequest, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the file with one of `BEHAVIOURS`, and return its URL."""
    if request.param in SLOW:
        monkeypatch.setattr(byte_source, "PATIENCE", 0.5)
    if request.param.startswith("trickling"):
        monkeypatch.setattr(byte_source, "LEAST_RATE", 1 << 24)
    monkeypatch.setattr(byte_source, "MAX_UNKNOWN", 1 << 23)
    respond = BEHAVIOURS[request.param]

    class Server(Handler):
        def do_GET(self) -> None:
            try:
                respond(self, data)
            except OSError:
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.ckptz"
        server.shutdown()


@pytest.mark.parametrize("served", BEHAVIOURS, indirect=True)
def test_each_server_gives_the_file_or_an_error_of_ckptz_or_the_os(
    served: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    errors = list[CkptzError | OSError]()
    calls = inspect, verify, load_file, lambda url: restore(url, tmp_path / "x.safetensors")
    for call in calls:
        try:
            call(served)
        except (CkptzError, OSError) as error:
            errors.append(error)
    name = request.node.callspec.params["served"]
    modules = {type(error).__module__.split(".")[0] for error in errors}
    assert modules <= {"builtins", "ckptz"}, errors
    assert len(errors) == (0 if name in WORK else len(calls))
    assert [*tmp_path.rglob("x*")] == [tmp_path / "x.safetensors"] * (name in WORK)
    assert [*tmp_path.glob("copies/*")] == []


@pytest.mark.parametrize("served", ["500", "stalled", "part of a range", "redirect to itself"], indirect=True)
def test_commands_on_failing_servers_exit_without_an_internal_error(served: str, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", served),
        ("restore", served, "-o", tmp_path / "x.safetensors"),
        ("log", served),
    ):
        run = ckptz(*arguments, fails=True)
        assert run.exit_code in (2, 3, 5, 7), run.stderr
        assert "internal error" not in run.stderr
    assert not any(tmp_path.iterdir())
