"""The workers meet before TensorFlow starts: it waits without end, deaf to signals, for a worker that does not come.

Each worker tells the chief its index, over TCP on the address that TensorFlow will use a moment later. When all are
there the chief says "go"; when the time is up it says who is missing, and all of them fail with that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from components.train.cluster import Cluster, PeerError

_RETRY_S = 0.2
_PATIENCE_S = 5.0


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Return when every worker of the cluster has started.

    Raises:
        PeerError: some have not within `timeout_s`; it names them.
    """
    if len(cluster.addresses) == 1:
        return
    deadline = time.monotonic() + timeout_s
    missing = _host(cluster, deadline) if cluster.is_chief else _join(cluster, deadline)
    if missing:
        raise PeerError(
            f"Worker {cluster.index} of {len(cluster.addresses)} waited {timeout_s:g} s in vain for {', '.join(missing)}. "
            "Look whether these processes run, and whether TF_CONFIG names the same addresses everywhere."
        )


def _host(cluster: Cluster, deadline: float) -> list[str]:
    guests: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(cluster))
        while len(guests) < len(cluster.addresses) - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError):
                guest = stack.enter_context(server.accept()[0])
                guest.settimeout(_PATIENCE_S)
                index = _receive(guest).get("index")
                if isinstance(index, int) and 0 < index < len(cluster.addresses):
                    guests[index] = guest
        absent = [index for index in range(1, len(cluster.addresses)) if index not in guests]
        missing = [_name(cluster, index) for index in absent]
        for guest in guests.values():
            with contextlib.suppress(OSError):
                _send(guest, {"missing": missing})
    return missing


def _join(cluster: Cluster, deadline: float) -> list[str]:
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_split(cluster.addresses[0]), timeout=left) as chief:
                _send(chief, {"index": cluster.index})
                # The chief's own deadline may lie a little after ours.
                chief.settimeout(left + _PATIENCE_S)
                answer = _receive(chief)
            if "missing" in answer:
                return list(answer["missing"])
            why = "it trains already, without this worker"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_RETRY_S)
    return [f"{_name(cluster, 0)}: {why}"]


def _listen(cluster: Cluster) -> socket.socket:
    host, port = _split(cluster.addresses[0])
    local = host in ("localhost", "127.0.0.1")
    try:
        return socket.create_server((host if local else "", port), backlog=len(cluster.addresses))
    except OSError as error:
        raise PeerError(
            f"The chief cannot listen on port {port}: {error.strerror}. Is another run using it?"
        ) from error


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket) -> dict[str, Any]:
    """One line of JSON; empty if what comes is something else."""
    received = b""
    while not received.endswith(b"\n") and len(received) < 1 << 16 and (more := peer.recv(4096)):
        received += more
    try:
        message = json.loads(received)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _name(cluster: Cluster, index: int) -> str:
    return f"worker {index} ({cluster.addresses[index]})"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
