"""What is read of a trial: how often each version was called, how often in vain, how long it took.

`ServerPages` reads the servers' own Prometheus pages. Several servers of one model (replicas) are added up. Counters only
grow, so what happened since a reading is the difference to it; a server that has been restarted since counts from zero,
and so does a version loaded anew after the server has forgotten it. `prometheus` asks a Prometheus that scrapes them.
Failed calls are those with another code than OK and CANCELLED.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serving.errors import Code, ServingError, invalid_argument
from serving.rollout.judge import CallCounts
from serving.traffic import Traffic

DEFAULT_PATH = "/monitoring/prometheus/metrics"
CALLS, BUCKETS, STATE = "headrace_signature_calls_total", "headrace_signature_seconds_bucket", "headrace_version_state"
NOT_A_FAILURE = ("OK", "CANCELLED")
_STARTED = "process_start_time_seconds"
_ALARM, _NUM_ALARMS = "headrace_alarm", "headrace_monitor_alarms"  # components/monitor/report.py

Page = Sequence[Sample]
# Server -> counter -> value; a counter is "calls 4", "errors 4" or "seconds 4 0.05": of version 4, at most 0.05 s; _STARTED
# is beside them. It is what a rollout keeps in its file, so it is JSON-able.
Reading = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Trial:
    """A version on trial.

    Attributes:
        model: the model's name on the servers.
        traffic: how its requests are divided.
        began_seconds: Unix time since when the calls count.
        baseline: what the source had counted then.
    """

    model: str
    traffic: Traffic
    began_seconds: float
    baseline: Reading


@dataclass(frozen=True)
class Observation:
    """What has happened in a trial.

    Attributes:
        stable: calls of the stable version.
        canary: calls of the version on trial.
        alarms: what else speaks against it.
    """

    stable: CallCounts
    canary: CallCounts
    alarms: list[str] = field(default_factory=list)


class Source(Protocol):
    """Where it is read how a trial goes."""

    def baseline(self, model: str) -> Reading:
        """What has been counted so far, for a trial that begins now.

        Raises:
            ServingError: UNAVAILABLE when it cannot be read, INVALID_ARGUMENT when versions cannot be told apart in it.
        """

    def observe(self, trial: Trial) -> Observation:
        """What has happened since a trial began.

        Raises:
            ServingError: as `baseline`.
        """


@dataclass(frozen=True)
class ServerPages:
    """The pages of metrics of all servers of a model.

    Attributes:
        urls: of the servers, with or without the path of the page; or files.
    """

    urls: Sequence[str]

    def baseline(self, model: str) -> Reading:
        """See Source."""
        return read_counters(self._scrape(), model)

    def observe(self, trial: Trial) -> Observation:
        """See Source."""
        pages = self._scrape()
        counted = since(read_counters(pages, trial.model), trial.baseline)
        canary = trial.traffic.canary
        assert canary is not None
        return Observation(
            calls_of(trial.traffic.stable, counted),
            calls_of(canary, counted),
            list(_failed_loads(pages, trial.model, canary)),
        )

    def _scrape(self) -> dict[str, Page]:
        pages = {url: scrape(url) for url in self.urls}
        for url, page in pages.items():
            if page and all(sample.name.startswith(":") for sample in page):  # its names are paths: /tensorflow/...
                raise invalid_argument(
                    f"{url} is a TF Serving, whose metrics do not tell versions apart: where they run in pods of their own, "
                    "give --prometheus with --stable_series and --canary_series"
                )
        return pages


def scrape(url: str, timeout_seconds: float = 10.0) -> Page:
    """A page of metrics: of a server, with or without the path of its page, or a file.

    Raises:
        ServingError: UNAVAILABLE, saying how to make the page available.
    """
    try:
        return parse(_fetch(url, timeout_seconds))
    except ValueError as error:
        raise ServingError(Code.UNAVAILABLE, f"{url} gives no page of Prometheus metrics: {error}") from error


def _fetch(url: str, timeout_seconds: float) -> str:
    if "://" not in url:
        try:
            return Path(url).read_text()
        except OSError as error:
            raise ServingError(Code.UNAVAILABLE, f"the metrics {url} cannot be read: {error.strerror}") from error
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    page = f"{scheme}://{host}{slash}{path}" if path else f"{scheme}://{host}{DEFAULT_PATH}"
    try:
        with urllib.request.urlopen(page, timeout=timeout_seconds) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        mend = "start the server with --monitoring_config_file" if error.code == 404 else "see the server's log"
        raise ServingError(Code.UNAVAILABLE, f"{page} answers {error.code}; {mend}") from error
    except OSError as error:
        raise ServingError(Code.UNAVAILABLE, f"{page} cannot be read: {error}") from error


def parse(text: str) -> Page:
    """The samples of a page.

    Raises:
        ValueError: it is none.
    """
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def read_counters(pages: Mapping[str, Page], model: str) -> Reading:
    """What servers have counted of a model's versions since they started.

    Args:
        pages: server -> its page.
        model: the model's name.
    """
    return {server: _counters(page, model) for server, page in pages.items()}


def _failed_loads(pages: Mapping[str, Page], model: str, version: int) -> Iterator[str]:
    """The servers that could not load a version, with the code of the error."""
    for server, page in pages.items():
        for sample in _of_model(page, model):
            if sample.name == STATE and sample.labels["version"] == str(version) and sample.labels["code"] != "OK":
                yield failed_load(server, version, sample.labels["code"])


def failed_load(server: str, version: int, code: str) -> str:
    """What is said of a server that could not load a version."""
    return f"{server} could not load version {version}: {code}"


def drifted(page: Page, model: str) -> list[str]:
    """The alarms on a page of `monitor`.

    Raises:
        ServingError: INVALID_ARGUMENT when the page is of no monitor of this model.
    """
    samples = list(_of_model(page, model))
    if not any(sample.name == _NUM_ALARMS for sample in samples):
        raise invalid_argument(f"the alarms hold no {_NUM_ALARMS} of model {model}; give metrics.prom of its monitor")
    return [
        f"monitor has an alarm: {' '.join(filter(None, map(sample.labels.get, ('kind', 'name', 'slice', 'reference'))))}"
        for sample in samples
        if sample.name == _ALARM and sample.value
    ]


def _of_model(page: Page, model: str) -> Iterable[Sample]:
    return (sample for sample in page if sample.labels.get("model") == model)


def _counters(page: Page, model: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    found.update((_STARTED, sample.value) for sample in page if sample.name == _STARTED)
    for sample in _of_model(page, model):
        version = sample.labels.get("version")
        if sample.name == CALLS:
            found[f"calls {version}"] += sample.value
            if sample.labels["code"] not in NOT_A_FAILURE:
                found[f"errors {version}"] += sample.value
        elif sample.name == BUCKETS:
            found[f"seconds {version} {float(sample.labels['le'])}"] += sample.value
    return dict(found)


def since(now: Reading, before: Reading) -> Reading:
    """What has been counted between two readings."""
    return {server: _since(counters, before.get(server, {})) for server, counters in now.items()}


def _since(now: Mapping[str, float], before: Mapping[str, float]) -> Mapping[str, float]:
    if now.get(_STARTED) != before.get(_STARTED):
        return now  # the server has been restarted
    return {
        counter: value - before.get(counter, 0.0) if value >= before.get(counter, 0.0) else value
        for counter, value in now.items()
    }


def calls_of(version: int, reading: Reading) -> CallCounts:
    """The calls of a version on all servers."""
    calls = errors = 0.0
    buckets: dict[float, float] = defaultdict(float)
    for counters in reading.values():
        calls += counters.get(f"calls {version}", 0.0)
        errors += counters.get(f"errors {version}", 0.0)
        for counter, value in counters.items():
            if counter.startswith(f"seconds {version} "):
                buckets[float(counter.split()[2])] += value
    return CallCounts(calls, errors, buckets)
