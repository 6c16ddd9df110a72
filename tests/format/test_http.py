"""Servers that do what they should not: each ends in an error of ours, soon, and nothing is written."""

import gzip
import http.server
import io
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz import inspect, restore, verify
from ckptz.errors import CkptzError
from ckptz.format import byte_source
from ckptz.numpy import load_file, save_file
from tests.support.cli_support import ckptz

Handler = http.server.BaseHTTPRequestHandler


def _send(handler: Handler, code: int, body: bytes = b"", **headers: object) -> None:
    handler.send_response(code)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Content-Length": len(body), **given}.items():
        if value is not None:
            handler.send_header(name, str(value))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _range(handler: Handler, data: bytes) -> tuple[int, int]:
    begin, _, end = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    return int(begin or 0), min(int(end or len(data) - 1), len(data) - 1)


def _ranged(handler: Handler, data: bytes, **headers: object) -> None:
    if "Range" not in handler.headers:
        _send(handler, 200, data, **{"Accept-Ranges": "bytes", **headers})
        return
    first, last = _range(handler, data)
    said = {"Content-Range": f"bytes {first}-{last}/{len(data)}", **headers}
    _send(handler, 206, data[first : last + 1], **said)


def _stall(handler: Handler, data: bytes, n: int) -> None:
    _send(handler, 200, b"", Content_Length=len(data))
    if handler.command != "HEAD":
        handler.wfile.write(data[:n])
        handler.wfile.flush()
        time.sleep(1.5)


def _trickle(handler: Handler, data: bytes, send: Callable[[Handler, bytes], None]) -> None:
    """Send the body a byte now and then, so that the server is never silent for long."""
    body = io.BytesIO()
    handler.wfile, out = body, handler.wfile
    send(handler, data)
    handler.wfile = out
    head, _, rest = body.getvalue().partition(b"\r\n\r\n")
    out.write(head + b"\r\n\r\n")
    for at in range(len(rest)):
        out.write(rest[at : at + 1])
        time.sleep(0.1)


def _endless(handler: Handler, data: bytes) -> None:
    _send(handler, 200, b"", Content_Length=None)
    while handler.command != "HEAD":  # until its reader goes away
        handler.wfile.write(bytes(1 << 20))


def _chunked(handler: Handler, chunks: list[bytes], end: bytes) -> None:
    _send(handler, 200, b"", Content_Length=None, Transfer_Encoding="chunked")
    if handler.command != "HEAD":
        handler.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + end)
        handler.close_connection = True


BEHAVIOURS: dict[str, Callable[[Handler, bytes], None]] = {
    **{str(code): lambda h, d, code=code: _send(h, code) for code in (301, 400, 401, 403, 404, 410, 418)},
    **{str(code): lambda h, d, code=code: _send(h, code, b"sorry") for code in (429, 500, 502, 503, 504)},
    "416 to ranges": lambda h, d: _send(h, 416) if "Range" in h.headers else _ranged(h, d),
    "500 to ranges": lambda h, d: _send(h, 500) if "Range" in h.headers else _ranged(h, d),
    "loop": lambda h, d: _send(h, 302, Location=h.path),
    "elsewhere": lambda h, d: _send(h, 302, Location="http://127.0.0.1:9/nobody"),
    "longer than said": lambda h, d: _send(h, 200, d, Content_Length=len(d) - 9),
    "shorter than said": lambda h, d: _send(h, 200, d[:-9], Content_Length=len(d)),
    "half a range": lambda h, d: _send(h, 206, d[:3]) if "Range" in h.headers else _ranged(h, d),
    "another range": lambda h, d: _ranged(h, d, Content_Range=f"bytes 5-9/{len(d)}"),
    "no length": lambda h, d: _send(h, 200, d[: len(d) // 2], Content_Length=None),
    "a page": lambda h, d: _send(h, 200, b"<html>log in</html>"),
    "nothing": lambda h, d: _send(h, 200),
    "gzip": lambda h, d: _send(h, 200, gzip.compress(d), Content_Encoding="gzip"),
    "stalled": lambda h, d: _stall(h, d, 5),
    "stalled at once": lambda h, d: _stall(h, d, 0),
    "trickling": lambda h, d: _trickle(h, d, lambda h, d: _send(h, 200, d)),
    "trickling ranges": lambda h, d: _trickle(h, d, _ranged),
    "endless": _endless,
    "a huge length": lambda h, d: _send(h, 200, d, Content_Length=1 << 50),
    "a huge length to ranges": lambda h, d: _ranged(h, d, Content_Range=f"bytes 0-{len(d)}/{1 << 50}"),
    "a length of words": lambda h, d: _send(h, 200, d, Content_Length="many"),
    "a negative length": lambda h, d: _send(h, 200, d, Content_Length=-5),
    "all to each range": lambda h, d: _send(h, 200, d, Accept_Ranges="bytes"),
    "no HEAD": lambda h, d: _send(h, 405) if h.command == "HEAD" else _ranged(h, d),
    "another length to HEAD": lambda h, d: (
        _send(h, 200, b"", Content_Length=7) if h.command == "HEAD" else _ranged(h, d)
    ),
    "chunks that are cut": lambda h, d: _chunked(h, [d[:99]], b""),
    "chunks of nonsense": lambda h, d: _chunked(h, [d[:99]], b"zz\r\n"),
    "chunks": lambda h, d: _chunked(h, [d[i : i + 999] for i in range(0, len(d), 999)], b"0\r\n\r\n"),
    "cut": lambda h, d: _ranged(h, d[: len(d) // 2]),
    "other bytes": lambda h, d: _ranged(h, d[::-1]),
    "no words": lambda h, d: h.wfile.write(b"\x00\xff nonsense\r\n\r\n") and None,
    "closed": lambda h, d: h.connection.close(),
    "good": _ranged,
    "good, whole": lambda h, d: _send(h, 200, d),
}
WORK = {"good", "good, whole", "gzip", "chunks", "no HEAD", "another range", "all to each range"}
WORK |= {"a huge length to ranges"}
# Only these never end by themselves: on a machine that has much else to do, others may take their time.
SLOW = {"stalled", "stalled at once", "trickling", "trickling ranges", "another range"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("served") / "x.ckptz"
    save_file({"x": np.random.default_rng(0).standard_normal(40_000)}, path)
    return path.read_bytes()


@pytest.fixture
def served(request: pytest.FixtureRequest, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param in SLOW:
        monkeypatch.setattr(byte_source, "PATIENCE", 0.5)
    if request.param.startswith("trickling"):
        monkeypatch.setattr(byte_source, "LEAST_RATE", 1 << 24)
    monkeypatch.setattr(byte_source, "MAX_UNKNOWN", 1 << 23)
    behave = BEHAVIOURS[request.param]

    class Served(Handler):
        def do_GET(self) -> None:
            try:
                behave(self, data)
            except OSError:
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.ckptz"
        server.shutdown()


@pytest.mark.parametrize("served", BEHAVIOURS, indirect=True)
def test_each_server_ends_soon_and_in_an_error_of_ours(
    served: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    errors = list[Any]()
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


@pytest.mark.parametrize("served", ["500", "stalled", "half a range", "loop"], indirect=True)
def test_the_command_line_says_it_in_a_line(served: str, tmp_path: Path) -> None:
    for words in (
        ("inspect", served),
        ("restore", served, "-o", tmp_path / "x.safetensors"),
        ("log", served),
    ):
        done = ckptz(*words, fails=True)
        assert done.exit_code in (2, 3, 5, 7), done.stderr
        assert "internal error" not in done.stderr
    assert not any(tmp_path.iterdir())
