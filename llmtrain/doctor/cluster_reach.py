"""Check that other nodes reach the addresses at which gloo and NCCL (RCCL) will listen on this one.

The interface is the environment's choice, and a wrong one shows in no other way than by collectives that wait.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UserError

_IPV4_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SECONDS = 5.0
"""Time for one connection."""


@dataclass(frozen=True)
class Place:
    """An address of this node, and what chose it."""

    what: str
    address: str
    port: int = 0


def places(on_gpu: bool) -> list[Place]:
    """Addresses of collectives. Raises UserError for an interface that this node does not have."""
    found: list[Place | None] = [_named("GLOO_SOCKET_IFNAME") or _by_host_name()]
    if on_gpu:
        found.append(_named("NCCL_SOCKET_IFNAME"))  # without it, NCCL chooses
    return [place for place in found if place is not None]


def _named(variable: str) -> Place | None:
    wanted = os.environ.get(variable, "")
    if not wanted or wanted.startswith("^"):  # NCCL's: any but these
        return None
    known = [name for _, name in socket.if_nameindex()]
    for name in wanted.removeprefix("=").split(","):
        for one in known:
            # NCCL takes the beginning of a name, gloo a whole one.
            if one == name or (variable.startswith("NCCL") and wanted[0] != "=" and one.startswith(name)):
                with contextlib.suppress(OSError):  # no address
                    return Place(f"{variable}={wanted}", _address(one))
                return None
    raise UserError(f"{variable}={wanted}, but this node has the interfaces {', '.join(known)}")


def _address(interface: str) -> str:
    """An address of an interface, of IPv4 if it has one. Raises OSError if it has none that other nodes can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, contextlib.suppress(OSError):
        answer = fcntl.ioctl(one.fileno(), _IPV4_ADDRESS, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(answer[20:24])
    for line in _IPV6_ADDRESSES.read_text().splitlines():
        address, _, _, scope, _, name = line.split()
        if name == interface and scope == "00":  # global
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise OSError(errno.EADDRNOTAVAIL, f"{interface} has no address")


def _by_host_name() -> Place:
    name = socket.gethostname()
    try:
        return Place(
            f"the address of the name {name}; set GLOO_SOCKET_IFNAME", str(socket.getaddrinfo(name, 0)[0][4][0])
        )
    except OSError:  # gloo falls back to this
        return Place(f"no address for the name {name}; set GLOO_SOCKET_IFNAME", "127.0.0.1")


@contextlib.contextmanager
def listening(at: list[Place], answer: str) -> Iterator[list[Place]]:
    """Context in which this process answers at these places, at ports of its choice. Raises OSError."""
    with contextlib.ExitStack() as held:
        found = []
        for place in at:
            family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
            listener = held.enter_context(socket.create_server((place.address, 0), family=family, backlog=16))
            threading.Thread(target=_serve, args=(listener, answer), name="reach", daemon=True).start()
            held.callback(listener.shutdown, socket.SHUT_RDWR)  # ends accept
            found.append(Place(place.what, place.address, listener.getsockname()[1]))
        yield found


def _serve(listener: socket.socket, answer: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as one:
                one.sendall(answer.encode())


def unreached(place: Place, expected: str) -> str | None:
    """The reason why another node's place cannot be reached from here, or None. expected: what it answers."""
    try:
        with socket.create_connection((place.address, place.port), timeout=_SECONDS) as one:
            heard = one.recv(64).decode(errors="replace")
    except OSError as error:
        return f"{place.address} ({place.what}): {error.strerror or error}"
    return None if heard == expected else f"{place.address} ({place.what}): another machine answers there"
