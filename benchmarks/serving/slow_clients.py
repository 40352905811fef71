"""Clients that send their request a few bytes at a time, in a process of their own; see scenarios.slow_clients.

    python -m benchmarks.serving.slow_clients '{"port": 8501, "clients": 10000, "sweeps": 20, "sweep_s": 1.0}'

Says `{"opened_in_s": seconds}` once all connections are open, and `{"answered": N}` once all have their answer,
which must be right.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.serving.contenders import CONTENDERS, OURS, REST
from benchmarks.serving.load import Connection, LoadError
from benchmarks.serving.workloads import WORKLOADS


def main(port: int, clients: int, sweeps: int, sweep_s: float) -> None:
    """Open the connections, send a part of each request in every sweep over them, then read the answers."""
    rows = WORKLOADS["half_plus_two"].rows()
    exchanges = CONTENDERS[OURS].exchanges(REST, rows, rows / 2 + 2)
    started = time.perf_counter()
    connections = [Connection(port, index) for index in range(clients)]
    print(json.dumps({"opened_in_s": time.perf_counter() - started}), flush=True)
    for sweep in range(sweeps):
        end = time.perf_counter() + sweep_s
        for connection in connections:
            request = exchanges[connection.turn % len(exchanges)].request
            part = slice(len(request) * sweep // sweeps, len(request) * (sweep + 1) // sweeps)
            connection.socket.sendall(request[part])
        time.sleep(max(0.0, end - time.perf_counter()))
    answered = 0
    for connection in connections:
        while (body := connection.receive()) is None:
            pass
        exchanges[connection.turn % len(exchanges)].check(body)
        answered += 1
    print(json.dumps({"answered": answered}), flush=True)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except (LoadError, OSError) as error:
        sys.exit(f"Error: {error}")
