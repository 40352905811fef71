"""The steps of a rollout: a version goes on trial, gets more of the requests, is promoted or taken back.

What is served stands in `traffic.json` (see serving.traffic); `rollout.json` beside it keeps what the servers had counted
when the trial began, and the history.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from serving.errors import Code, ServingError, invalid_argument
from serving.rollout import readings
from serving.rollout.judge import Decision, Thresholds, Verdict, judge
from serving.traffic import Traffic, read_traffic, write_json, write_traffic
from serving.versions import find_versions

ROLLOUT_FILE = "rollout.json"


@dataclass(frozen=True)
class Observers:
    """Where it is read how a canary does.

    Attributes:
        servers: URLs of all servers of the model; their pages of metrics are read.
        alarms: pages (URLs or files) of `monitor`; each alarm on them speaks against the canary.
        thresholds: what the canary may not exceed.
    """

    servers: Sequence[str] = ()
    alarms: Sequence[str] = ()
    thresholds: Thresholds = field(default_factory=Thresholds)


class Rollout:
    """The rollout of one model.

    Args:
        base_path: the folder with the version directories.
        model: the model's name on the servers; by default the folder's.

    Raises:
        ServingError: NOT_FOUND without a version in the folder.

    Example:
        >>> rollout = Rollout(Path("pushed/taxi"))
        >>> rollout.deploy(version=4, canary_share=0.1)
        >>> rollout.promote()
    """

    def __init__(self, base_path: Path, model: str = "") -> None:
        self.base_path = base_path
        self.model = model or base_path.absolute().name
        if not self.versions():
            raise ServingError(Code.NOT_FOUND, f"{base_path} holds no version directory; push a model first")

    def versions(self) -> list[int]:
        """The versions in the folder, ascending."""
        try:
            return sorted(find_versions(self.base_path))
        except OSError as error:
            raise ServingError(Code.NOT_FOUND, f"{self.base_path} cannot be listed: {error.strerror}") from error

    def traffic(self) -> Traffic | None:
        """How the requests are divided at present; None while the servers' version policy decides."""
        return read_traffic(self.base_path)

    def history(self) -> list[Mapping[str, Any]]:
        """What has been done, oldest first: time (ISO 8601), action, traffic and reasons."""
        return self._state()["history"]

    def deploy(self, version: int | None = None, canary_share: float = 0.1, servers: Sequence[str] = ()) -> Traffic:
        """Put a version on trial, or give the one on trial another share.

        The first version of a model has nothing to be compared with, and gets all requests at once.

        Args:
            version: the version; by default the newest in the folder.
            canary_share: its share of the requests, 0 to 1; 1 promotes it at once.
            servers: their counts at this moment are kept, so that only what happens from now on is judged.

        Raises:
            ServingError: NOT_FOUND without such a version, FAILED_PRECONDITION when another one is on trial or this one
                is the stable one, UNAVAILABLE when a server's metrics cannot be read.
        """
        with self._locked():
            versions = self.versions()
            version = versions[-1] if version is None else version
            if version not in versions:
                raise ServingError(Code.NOT_FOUND, f"{self.base_path} holds no version {version}, only {versions}")
            now = self.traffic()
            others = [number for number in versions if number != version]
            if now is not None and now.canary not in (None, version):
                raise ServingError(
                    Code.FAILED_PRECONDITION,
                    f"version {now.canary} is on trial with {now.canary_share:.0%} of the requests; "
                    "promote it or roll it back first",
                )
            if now is not None and now.stable == version:
                raise ServingError(Code.FAILED_PRECONDITION, f"version {version} is the stable one already")
            stable = now.stable if now is not None else max(others, default=None)
            if stable is None or canary_share == 1:
                return self._divide(Traffic(version), "promote", [])
            traffic = Traffic(stable, version, canary_share)
            if now is None or now.canary is None:
                self._keep_baseline(servers)
            return self._divide(traffic, "deploy", [])

    def promote(self, reasons: Sequence[str] = ()) -> Traffic:
        """Make the version on trial the stable one.

        Raises:
            ServingError: FAILED_PRECONDITION when none is on trial.
        """
        with self._locked():
            now = self.traffic()
            if now is None or now.canary is None:
                raise ServingError(Code.FAILED_PRECONDITION, f"no version of {self.base_path} is on trial")
            return self._divide(Traffic(now.canary), "promote", reasons)

    def rollback(self, reasons: Sequence[str] = ()) -> Traffic:
        """Take back the version on trial; when none is, go back to the version that was stable before.

        Raises:
            ServingError: FAILED_PRECONDITION when there is no earlier version, or it is gone.
        """
        with self._locked():
            now = self.traffic()
            if now is not None and now.canary is not None:
                return self._divide(Traffic(now.stable), "rollback", reasons)
            current = now.stable if now is not None else self.versions()[-1]
            return self._divide(Traffic(self._earlier_than(current)), "rollback", reasons)

    def _earlier_than(self, current: int) -> int:
        """The version that was stable before, as the history has it, else the next lower one in the folder."""
        versions = self.versions()
        line: list[int] = []  # of stable versions, each the successor of the one before
        for event in self.history():
            if event["stable"] in line:
                del line[line.index(event["stable"]) :]
            line.append(event["stable"])
        earlier = [version for version in versions if version < current]
        earlier += [version for version in line[:-1] if version in versions]
        if not earlier:
            raise ServingError(
                Code.FAILED_PRECONDITION, f"there is no version before {current} in {self.base_path}, only {versions}"
            )
        return earlier[-1]

    def verdict(self, observers: Observers) -> Verdict:
        """How the version on trial does.

        Raises:
            ServingError: FAILED_PRECONDITION when none is on trial, UNAVAILABLE when metrics cannot be read.
        """
        now = self.traffic()
        if now is None or now.canary is None:
            raise ServingError(Code.FAILED_PRECONDITION, f"no version of {self.base_path} is on trial")
        pages = {server: readings.scrape(server) for server in observers.servers}
        counted = readings.since(readings.read_counters(pages, self.model), self._state()["baseline"])
        alarms = readings.failed_loads(pages, self.model, now.canary)
        for page in observers.alarms:
            alarms += readings.drifted(readings.scrape(page), self.model)
        stable, canary = (readings.calls_of(version, counted) for version in (now.stable, now.canary))
        return judge(stable, canary, observers.thresholds, alarms)

    def watch(
        self,
        observers: Observers,
        *,
        shares: Sequence[float] = (),
        every_seconds: float = 10.0,
        timeout_seconds: float = 3600.0,
        report: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Decision:
        """Look at the version on trial until it is promoted or taken back.

        Args:
            observers: where to look.
            shares: ascending; each time the canary has proven itself it gets the next one, and is judged anew.
            every_seconds: time between two looks.
            timeout_seconds: after this the rollout is left as it stands.
            report: told of each look and step.
            clock: seconds, for the timeout.
            sleep: waits between two looks.

        Returns:
            PROMOTE or ROLL_BACK, which has been done, or WAIT when time ran out.

        Raises:
            ServingError: as `verdict`; FAILED_PRECONDITION when somebody else changed the traffic meanwhile.
        """
        if not observers.servers:
            raise invalid_argument("no server to read metrics from; give at least one")
        expected = self.traffic()
        waiting = [share for share in shares if expected is not None and share > expected.canary_share]
        end = clock() + timeout_seconds
        while True:
            if self.traffic() != expected:
                raise ServingError(Code.FAILED_PRECONDITION, "somebody else changed the traffic; the watch ends here")
            verdict = self.verdict(observers)
            report(f"{verdict.decision.value}: {'; '.join(verdict.reasons)}")
            if verdict.decision is Decision.ROLL_BACK:
                report(f"version {self.rollback(verdict.reasons).stable} gets all requests")
                return Decision.ROLL_BACK
            if verdict.decision is Decision.PROMOTE:
                if not waiting:
                    report(f"version {self.promote(verdict.reasons).stable} gets all requests")
                    return Decision.PROMOTE
                expected = self._widen(waiting.pop(0), verdict.reasons, observers.servers)
                report(f"the canary gets {expected.canary_share:.0%} of the requests")
            if clock() >= end:
                report("time is up, and the traffic stays as it is")
                return Decision.WAIT
            sleep(every_seconds)

    def _widen(self, share: float, reasons: Sequence[str], servers: Sequence[str]) -> Traffic:
        with self._locked():
            now = self.traffic()
            assert now is not None
            self._keep_baseline(servers)
            return self._divide(Traffic(now.stable, now.canary, share), "widen", reasons)

    def _keep_baseline(self, servers: Sequence[str]) -> None:
        pages = {server: readings.scrape(server) for server in servers}
        self._write_state(self._state() | {"baseline": readings.read_counters(pages, self.model)})

    def _divide(self, traffic: Traffic, action: str, reasons: Sequence[str]) -> Traffic:
        event = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "action": action,
            "stable": traffic.stable,
            "canary": traffic.canary,
            "canary_share": traffic.canary_share,
            "reasons": list(reasons),
        }
        state = self._state()
        write_traffic(self.base_path, traffic)
        self._write_state(state | {"history": [*state["history"], event]})
        return traffic

    def _state(self) -> dict[str, Any]:
        path = self.base_path / ROLLOUT_FILE
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            return {"baseline": {}, "history": []}
        except ValueError as error:
            raise invalid_argument(f"{path} is damaged: {error}; move it away to begin a new history") from error
        return state

    def _write_state(self, state: Mapping[str, Any]) -> None:
        write_json(self.base_path / ROLLOUT_FILE, state)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One command at a time changes the traffic of a model."""
        handle = os.open(self.base_path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
