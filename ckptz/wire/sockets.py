"""A plain `send`/`recv` pair over a connected stream socket; needs no torch."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.dtypes import DType, dtype_of
from ckptz.errors import ConfigError, WireError
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, Direction
from ckptz.wire.policy import LinkPolicy
from ckptz.wire.state import Place

_NAMES = dict(f4="F32", f2="F16", f8="F64", u1="U8", i1="I8", i2="I16", i4="I32", i8="I64")


def _named(array: NDArray[Any], dtype: str | None) -> DType:
    name = dtype or _NAMES.get(array.dtype.str[1:])
    if name is None:
        raise ConfigError(f"name the dtype of {array.dtype} arrays, as dtype='BF16' for patterns of bfloat16")
    return dtype_of(name)


class SocketLink:
    """One end of a link over a socket.

    Args:
        connection: a connected stream socket; this object neither opens nor closes it.
        src, dst, policy, options: as for `Link`.
        timeout: seconds that a header, or a payload, may take.
    """

    def __init__(
        self,
        connection: socket.socket,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        *,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        self._connection, self._timeout = connection, timeout
        self.link = Link(src, dst, policy, **options)
        self._sent = dict.fromkeys(Direction, 0)
        self._received = dict.fromkeys(Direction, 0)

    def send(
        self,
        array: NDArray[Any],
        direction: Direction = Direction.FORWARD,
        place: Place | None = None,
        dtype: str | None = None,
    ) -> None:
        """Send an array of any shape [...]. Without `place`, messages are numbered."""
        place = place or Place(self._sent[direction])
        kind = _named(array, dtype)
        units = np.ascontiguousarray(array).reshape(-1).view(f"<u{kind.unit_bytes}")
        message = self.link.send(direction, units, kind, array.shape, place).message
        self._sent[direction] = place.step + 1
        try:
            self._connection.settimeout(self._timeout)
            self._connection.sendall(message.data)
        except OSError as error:
            raise WireError(f"{self.link.name_of(direction, place)}: send: {error}") from None

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: str = "F32",
        direction: Direction = Direction.FORWARD,
        place: Place | None = None,
    ) -> NDArray[Any]:
        """Receive the bit patterns of a tensor as unsigned integers [*shape]; `.view(np.float32)` for F32.

        Raises:
            WireError: the peer is gone or silent, or the message is not the one that is due.
        """
        place = place or Place(self._received[direction])
        kind, name = dtype_of(dtype), self.link.name_of(direction, place)
        head = self._read(HEADER_BYTES, f"{name}: header")
        n_bytes = self.link.expect(direction, bytes(head), kind, shape, place)
        payload = self._read(n_bytes, f"{name}: payload")
        message = np.concatenate([head, payload])
        self._received[direction] = place.step + 1
        return self.link.receive(direction, message, kind, shape, place).reshape(shape)

    def _read(self, n_bytes: int, what: str) -> NDArray[np.uint8]:
        out, done = np.empty(n_bytes, np.uint8), 0
        end = time.monotonic() + self._timeout
        while done < n_bytes:
            try:
                self._connection.settimeout(max(end - time.monotonic(), 1e-3))
                n_read = self._connection.recv_into(out.data[done:])
            except TimeoutError:
                raise WireError(
                    f"{what}: {done} of {n_bytes} bytes came within {self._timeout:g} s"
                ) from None
            except OSError as error:
                raise WireError(f"{what}: {error}") from None
            if not n_read:
                raise WireError(f"{what}: the peer closed the connection after {done} of {n_bytes} bytes")
            done += n_read
        return out
