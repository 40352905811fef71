"""What servers have counted, read from their Prometheus pages: the calls of each version, and whether it could be loaded.

Several servers of one model (replicas) are added up. Counters only grow, so what happened since a reading is the
difference to it; a server that has been restarted since counts from zero, and so does a version loaded anew after the
server has forgotten it. Failed calls are those with another code than OK and CANCELLED.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serving.errors import Code, ServingError, invalid_argument
from serving.rollout.judge import CallCounts

DEFAULT_PATH = "/monitoring/prometheus/metrics"
_CALLS, _BUCKETS = "headrace_signature_calls_total", "headrace_signature_seconds_bucket"
_STATE = "headrace_version_state"
_STARTED = "process_start_time_seconds"
_ALARM, _NUM_ALARMS = "headrace_alarm", "headrace_monitor_alarms"  # components/monitor/report.py
_NOT_A_FAILURE = ("OK", "CANCELLED")

# Server -> counter -> value; a counter is "calls 4", "errors 4" or "seconds 4 0.05": of version 4, at most 0.05 s; _STARTED
# is beside them. It is what a rollout keeps in its file, so it is JSON-able.
Reading = Mapping[str, Mapping[str, float]]


def scrape(url: str, timeout_seconds: float = 10.0) -> str:
    """A page of metrics: of a server, with or without the path of its page, or a file.

    Raises:
        ServingError: UNAVAILABLE, saying how to make the page available.
    """
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
    except (OSError, ValueError) as error:
        raise ServingError(Code.UNAVAILABLE, f"{page} cannot be read: {error}") from error


def read_counters(pages: Mapping[str, str], model: str) -> Reading:
    """What servers have counted of a model's versions since they started.

    Args:
        pages: server -> its page.
        model: the model's name.
    """
    return {server: _counters(page, model) for server, page in pages.items()}


def failed_loads(pages: Mapping[str, str], model: str, version: int) -> list[str]:
    """The servers that could not load a version, with the code of the error."""
    return [
        f"{server} could not load version {version}: {sample.labels['code']}"
        for server, page in pages.items()
        for sample in _samples(page, model)
        if sample.name == _STATE and sample.labels["version"] == str(version) and sample.labels["code"] != "OK"
    ]


def drifted(page: str, model: str) -> list[str]:
    """The alarms on a page of `monitor`.

    Raises:
        ServingError: INVALID_ARGUMENT when the page is of no monitor of this model.
    """
    samples = list(_samples(page, model))
    if not any(sample.name == _NUM_ALARMS for sample in samples):
        raise invalid_argument(f"the alarms hold no {_NUM_ALARMS} of model {model}; give metrics.prom of its monitor")
    return [
        f"monitor has an alarm: {' '.join(filter(None, map(sample.labels.get, ('kind', 'name', 'slice', 'reference'))))}"
        for sample in samples
        if sample.name == _ALARM and sample.value
    ]


def _samples(page: str, model: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(page):
        yield from (sample for sample in family.samples if sample.labels.get("model") == model)


def _counters(page: str, model: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        if family.name == _STARTED:
            found[_STARTED] = family.samples[0].value
    for sample in _samples(page, model):
        version = sample.labels.get("version")
        if sample.name == _CALLS:
            found[f"calls {version}"] += sample.value
            if sample.labels["code"] not in _NOT_A_FAILURE:
                found[f"errors {version}"] += sample.value
        elif sample.name == _BUCKETS:
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
