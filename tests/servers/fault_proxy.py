"""A TCP proxy that breaks the answers of the server behind it, as networks and servers do."""

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_RECEIVE_BYTES = 1 << 16


@dataclass
class Faults:
    """What goes wrong; may be changed while the proxy runs.

    Attributes:
        kind: ``reset``, ``truncate`` or ``stall`` after ``after_bytes`` of an answer, ``unavailable`` (503 in place
            of an answer), ``flip`` (inverts every byte from ``after_bytes`` on) or ``none``; several, joined by ``+``,
            take turns.
        only: requests whose head does not hold this pass.
        times: so many answers are hit, all others pass; None hits all.
        after_bytes: answers that are shorter pass.
        connections: made so far.
        hit: answers hit so far.
        requests: the head of every request.
    """

    kind: str = "none"
    only: bytes = b""
    times: int | None = None
    after_bytes: int = 0
    connections: int = 0
    hit: int = 0
    requests: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_for(self, request: bytes) -> str:
        """What is to go wrong with the answer to this request."""
        kinds = self.kind.split("+")
        spent = self.times is not None and self.hit >= self.times
        return "none" if spent or self.only not in request else kinds[self.hit % len(kinds)]

    def take(self, kind: str, request: bytes) -> bool:
        """Whether it goes wrong so at this moment; counts it."""
        with self.lock:
            taken = self.next_for(request) == kind
            self.hit += taken
            return taken


# Key and certificate of localhost and 127.0.0.1, signed by itself; for tests alone, and good for a century.
CERTIFICATE = Path(__file__).with_name("localhost.pem")


@contextmanager
def fault_proxy(upstream: int, tls: bool = False) -> Iterator[tuple[int, Faults]]:
    """A proxy on 127.0.0.1 before the server on that port: its own port, and the faults to be set.

    With ``tls`` it speaks https, by ``CERTIFICATE``, for a server that speaks http.
    """
    faults, closing = Faults(), threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def accept() -> None:
            while not closing.is_set():
                try:
                    client, _ = listener.accept()
                except TimeoutError:
                    continue
                with faults.lock:
                    faults.connections += 1
                arguments = (client, context if tls else None, upstream, faults, closing)
                threading.Thread(target=_serve, args=arguments, daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1]), faults
        finally:
            closing.set()
            thread.join()


def _serve(
    client: socket.socket, tls: ssl.SSLContext | None, upstream: int, faults: Faults, closing: threading.Event
) -> None:
    if tls is not None:
        try:
            client = tls.wrap_socket(client, server_side=True)
        except OSError:
            return  # the client trusts nobody whom it does not know
    with client, socket.create_connection(("127.0.0.1", upstream)) as server:
        pump = threading.Thread(target=_pump, args=(client, server), daemon=True)
        try:
            request = client.recv(_RECEIVE_BYTES)
            with faults.lock:
                faults.requests.append(request)
            if faults.take("unavailable", request):
                client.sendall(_UNAVAILABLE)
                return
            # One request a connection, so that each is seen; the header is no part of what S3 requests sign.
            server.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            pump.start()
            struck = _answer(client, server, faults, request)
            if struck == "stall":
                closing.wait()
            if struck == "reset":
                # Closing sends a reset then, once no thread reads from the socket any more.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.shutdown(socket.SHUT_RD)
                pump.join(5)
            else:
                client.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # one of the two ends has closed the connection, so it is over


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while content := source.recv(_RECEIVE_BYTES):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _answer(client: socket.socket, server: socket.socket, faults: Faults, request: bytes) -> str:
    """Pass the answer on up to its end or the fault, whose kind is returned."""
    sent, flipping = 0, False
    while content := server.recv(_RECEIVE_BYTES):
        cut = max(0, faults.after_bytes - sent)
        if cut < len(content):
            kind = faults.next_for(request)
            if kind in ("reset", "truncate", "stall") and faults.take(kind, request):
                client.sendall(content[:cut])
                return kind
            flipping = flipping or (kind == "flip" and faults.take(kind, request))
        if flipping:
            content = content[:cut] + bytes(byte ^ 0xFF for byte in content[cut:])
        client.sendall(content)
        sent += len(content)
    return "none"


_ERROR = b"<Error><Code>SlowDown</Code></Error>"
_UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_ERROR), _ERROR)
)
