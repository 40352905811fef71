"""The steps of a rollout: a version goes on trial, gets more of the requests, is promoted or taken back.

What is served stands in a `Place`; `rollout.json` there keeps when the trial began, what the servers had counted then, and
the history.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from serving import atomic
from serving.errors import Code, ServingError, invalid_argument
from serving.rollout import readings
from serving.rollout.judge import Decision, Thresholds, Verdict, judge
from serving.rollout.places import Place
from serving.rollout.readings import Source, Trial
from serving.traffic import ROLLOUT_FILE, Traffic


@dataclass(frozen=True)
class Observers:
    """What says how a canary does.

    Attributes:
        source: counts the calls.
        alarms: pages (URLs or files) of `monitor`; each alarm on them speaks against the canary.
        thresholds: what the canary may not exceed.
    """

    source: Source
    alarms: Sequence[str] = ()
    thresholds: Thresholds = field(default_factory=Thresholds)


class Rollout:
    """The rollout of one model.

    Args:
        place: where it stands what is served.

    Example:
        >>> rollout = Rollout(VersionFolder(Path("pushed/taxi")))
        >>> rollout.deploy(version=4, canary_share=0.1)
        >>> rollout.promote()
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._folder = place.folder

    def history(self) -> list[Mapping[str, Any]]:
        """What has been done, oldest first: time (ISO 8601), action, traffic and reasons."""
        return self._state()["history"]

    def deploy(self, version: int | None = None, canary_share: float = 0.1, source: Source | None = None) -> Traffic:
        """Put a version on trial, or give the one on trial another share.

        The first version of a model has nothing to be compared with, and gets all requests at once.

        Args:
            version: the version; by default the newest that there is.
            canary_share: its share of the requests, 0 to 1; 1 promotes it at once.
            source: its counts at this moment are kept, so that only what happens from now on is judged.

        Raises:
            ServingError: NOT_FOUND without such a version, FAILED_PRECONDITION when another one is on trial or this one
                is the stable one, UNAVAILABLE when the source cannot be read; as Place.divide and Place.apply.
        """
        with self._locked():
            versions = self.place.versions()
            if version is None:
                if versions is None:
                    raise invalid_argument(f"{self._folder} does not say which versions there are: give --version")
                version = versions[-1]
            if versions is not None and version not in versions:
                raise ServingError(Code.NOT_FOUND, f"{self._folder} has no version {version}, only {versions}")
            now = self.place.traffic()
            if now is not None and now.canary not in (None, version):
                raise ServingError(
                    Code.FAILED_PRECONDITION,
                    f"version {now.canary} is on trial with {now.canary_share:.0%} of the requests; "
                    "promote it or roll it back first",
                )
            if now is not None and now.stable == version:
                raise ServingError(Code.FAILED_PRECONDITION, f"version {version} is the stable one already")
            stable = None if now is None else now.stable
            if now is None and versions is not None:
                stable = max((number for number in versions if number != version), default=None)
            elif now is None and canary_share < 1:
                raise ServingError(
                    Code.FAILED_PRECONDITION,
                    f"{self._folder} follows the newest version, so nothing says beside which one {version} is on trial: "
                    "write the manifests with stable_version=N, or give --canary_share 1",
                )
            if canary_share == 1 or stable is None:
                return self._divide(Traffic(version), "promote", [])
            traffic = Traffic(stable, version, canary_share)
            if now is None or now.canary is None:
                self._begin_trial(source)
            return self._divide(traffic, "deploy", [])

    def promote(self, reasons: Sequence[str] = ()) -> Traffic:
        """Make the version on trial the stable one.

        Raises:
            ServingError: FAILED_PRECONDITION when none is on trial; as Place.divide and Place.apply.
        """
        with self._locked():
            return self._divide(Traffic(self._on_trial()[1]), "promote", reasons)

    def rollback(self, reasons: Sequence[str] = ()) -> Traffic:
        """Take back the version on trial; when none is, go back to the version that was stable before.

        Raises:
            ServingError: FAILED_PRECONDITION when there is no earlier version, or it is gone; as Place.divide and
                Place.apply.
        """
        with self._locked():
            now = self.place.traffic()
            if now is not None and now.canary is not None:
                return self._divide(Traffic(now.stable), "rollback", reasons)
            return self._divide(Traffic(self._version_before(now)), "rollback", reasons)

    def _on_trial(self) -> tuple[Traffic, int]:
        now = self.place.traffic()
        if now is None or now.canary is None:
            raise ServingError(Code.FAILED_PRECONDITION, f"no version of {self._folder} is on trial")
        return now, now.canary

    def _version_before(self, now: Traffic | None) -> int:
        """The version that was stable before, as the history has it, else the next lower one that there is."""
        versions = self.place.versions()
        if now is None and versions is None:
            raise ServingError(
                Code.FAILED_PRECONDITION, f"{self._folder} follows the newest version, whichever that is"
            )
        line: list[int] = []  # of stable versions, each the successor of the one before
        for event in self.history():
            if event["stable"] in line:
                del line[line.index(event["stable"]) :]
            line.append(event["stable"])
        current = now.stable if now is not None else max(versions or [0])
        earlier = [version for version in versions or () if version < current]
        earlier += [version for version in line if version != current and (versions is None or version in versions)]
        if not earlier:
            known = f"there are only {versions}" if versions is not None else "rollout.json there knows none"
            raise ServingError(
                Code.FAILED_PRECONDITION, f"there is no version before {current} of {self._folder}: {known}"
            )
        return earlier[-1]

    def verdict(self, observers: Observers) -> Verdict:
        """How the version on trial does.

        Raises:
            ServingError: FAILED_PRECONDITION when none is on trial, UNAVAILABLE when metrics cannot be read.
        """
        now, _ = self._on_trial()
        state = self._state()
        trial = Trial(self.place.model, now, state["began_seconds"], state["baseline"])
        found = observers.source.observe(trial)
        alarms = found.alarms
        for page in observers.alarms:
            alarms += readings.drifted(readings.scrape(page), self.place.model)
        return judge(found.stable, found.canary, observers.thresholds, alarms)

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
        expected = self.place.traffic()
        waiting = [share for share in shares if expected is not None and share > expected.canary_share]
        end = clock() + timeout_seconds
        while True:
            if self.place.traffic() != expected:
                raise ServingError(Code.FAILED_PRECONDITION, "somebody else changed the traffic; the watch ends here")
            verdict = self.verdict(observers)
            report(f"{verdict.decision.value}: {'; '.join(verdict.reasons)}")
            if verdict.decision is Decision.ROLL_BACK:
                report(self.place.describe(self.rollback(verdict.reasons)))
                return Decision.ROLL_BACK
            if verdict.decision is Decision.PROMOTE:
                if not waiting:
                    report(self.place.describe(self.promote(verdict.reasons)))
                    return Decision.PROMOTE
                expected = self._widen(waiting.pop(0), verdict.reasons, observers.source)
                report(f"the canary gets {expected.canary_share:.0%} of the requests")
            if clock() >= end:
                report("time is up, and the traffic stays as it is")
                return Decision.WAIT
            sleep(every_seconds)

    def _widen(self, share: float, reasons: Sequence[str], source: Source) -> Traffic:
        with self._locked():
            now, canary = self._on_trial()
            self._begin_trial(source)
            return self._divide(Traffic(now.stable, canary, share), "widen", reasons)

    def _begin_trial(self, source: Source | None) -> None:
        baseline = {} if source is None else source.baseline(self.place.model)
        self._write_state(self._state() | {"began_seconds": time.time(), "baseline": baseline})

    def _divide(self, traffic: Traffic, action: str, reasons: Sequence[str]) -> Traffic:
        state, now = self._state(), self.place.traffic()
        history = state["history"]
        if now is not None and (not history or history[-1]["stable"] != now.stable):
            history = [*history, _event("found", now)]
        self.place.divide(traffic)
        self._write_state(state | {"history": [*history, _event(action, traffic, reasons)]})
        self.place.apply()
        return traffic

    def _state(self) -> dict[str, Any]:
        path = self._folder / ROLLOUT_FILE
        unknown = {"began_seconds": 0.0, "baseline": {}, "history": []}
        try:
            return unknown | json.loads(path.read_text())
        except FileNotFoundError:
            return unknown
        except (ValueError, TypeError) as error:
            raise invalid_argument(f"{path} is damaged: {error}; move it away to begin a new history") from error

    def _write_state(self, state: Mapping[str, Any]) -> None:
        atomic.write_text(self._folder / ROLLOUT_FILE, json.dumps(state))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One command at a time changes the traffic of a model."""
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _event(action: str, traffic: Traffic, reasons: Sequence[str] = ()) -> dict[str, Any]:
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"time": when, "action": action, **asdict(traffic), "reasons": list(reasons)}
