"""How a trial goes, from a Prometheus that scrapes the servers, by its HTTP API.

`increase` counts what happened in the time of the trial, over restarts and over replicas that come and go. It does not see
the calls before Prometheus first saw a series, so of a new one up to a scrape interval's are missing.

API: https://prometheus.io/docs/prometheus/latest/querying/api/#instant-queries. Thanos, Mimir, VictoriaMetrics and the
managed ones answer the same.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import Code, ServingError, invalid_argument
from serving.rollout import readings
from serving.rollout.judge import CallCounts
from serving.rollout.readings import Observation, Reading, Trial

# TF Serving's, whose latencies are in microseconds; neither has a label for the version.
_REQUESTS, _LATENCY_BUCKETS = ":tensorflow:serving:request_count", ":tensorflow:serving:request_latency_bucket"

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Series:
    """Which series are whose, for servers whose metrics do not name versions: TF Serving's.

    Attributes:
        stable: PromQL label matchers, such as `track="stable"`.
        canary: the same of the version on trial.
    """

    stable: str
    canary: str


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that scrapes all servers of a model.

    Attributes:
        url: such as http://prometheus:9090, or with a path, as behind a proxy.
        token_file: file with the token for `Authorization: Bearer`; None sends none.
        series: which series are whose; None reads the embedded server's metrics, which name versions.
        timeout_seconds: of a query.
        clock: Unix time in seconds.
    """

    url: str
    token_file: Path | None = None
    series: Series | None = None
    timeout_seconds: float = 30.0
    clock: Callable[[], float] = time.time

    def baseline(self, model: str) -> Reading:
        """See Source; Prometheus remembers by itself, so this only sees that it answers, and knows the servers."""
        found = self._query("vector(1)" if self.series else f"{readings.STATE}{{model={_quoted(model)}}}")
        if not found:
            raise invalid_argument(
                f"Prometheus {self.url} has no {readings.STATE} of model {model}: let it scrape the servers; for TF "
                "Serving, whose metrics do not tell versions apart, give --stable_series and --canary_series"
            )
        return {}

    def observe(self, trial: Trial) -> Observation:
        """See Source."""
        during = f"[{max(math.ceil(self.clock() - trial.began_seconds), 1)}s]"
        return self._by_version(trial, during) if self.series is None else self._by_series(trial, self.series, during)

    def _by_version(self, trial: Trial, during: str) -> Observation:
        stable, canary = trial.traffic.stable, trial.traffic.canary
        model = f"model={_quoted(trial.model)}"
        of_both = f'{{{model},version=~"{stable}|{canary}"}}{during}'
        calls = self._query(f"sum by (version, code) (increase({readings.CALLS}{of_both}))")
        buckets = self._query(f"sum by (version, le) (increase({readings.BUCKETS}{of_both}))")
        failed = self._query(f'{readings.STATE}{{{model},version="{canary}",code!="OK"}}')

        def counts(version: int | None) -> CallCounts:
            by_code = [(labels["code"], value) for labels, value in calls if labels["version"] == str(version)]
            return CallCounts(
                sum(value for _, value in by_code),
                sum(value for code, value in by_code if code not in readings.NOT_A_FAILURE),
                _histogram((labels["le"], value) for labels, value in buckets if labels["version"] == str(version)),
            )

        assert canary is not None
        alarms = [
            readings.failed_load(labels.get("instance", "a server"), canary, labels["code"]) for labels, _ in failed
        ]
        return Observation(counts(stable), counts(canary), alarms)

    def _by_series(self, trial: Trial, series: Series, during: str) -> Observation:
        model = f"model_name={_quoted(trial.model)}"

        def counts(matchers: str) -> CallCounts:
            failures = f'{{{model},status!~"{"|".join(readings.NOT_A_FAILURE)}",{matchers}}}{during}'
            # With an empty API are the requests for status and metadata, such as the probes'.
            successes = f'{{{model},API!="",{matchers}}}{during}'
            errors = sum(value for _, value in self._query(f"sum(increase({_REQUESTS}{failures}))"))
            found = self._query(f"sum by (le) (increase({_LATENCY_BUCKETS}{successes}))")
            buckets = _histogram(((labels["le"], value) for labels, value in found), per_second=1e6)
            return CallCounts(errors + max(buckets.values(), default=0.0), errors, buckets)

        return Observation(counts(series.stable), counts(series.canary))

    def _query(self, promql: str) -> list[tuple[Labels, float]]:
        """The labels and values that an instant query gives.

        Raises:
            ServingError: UNAVAILABLE, with what Prometheus says and what to do.
        """
        answer = self._get(f"{self.url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': promql})}", promql)
        try:
            return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._failed(f"answers {promql} with something else than a vector") from error

    def _get(self, url: str, promql: str) -> Any:
        try:
            headers = {}
            if self.token_file is not None:
                headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers), timeout=self.timeout_seconds
            ) as response:
                status, body = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read()
        except (OSError, ValueError) as error:
            raise self._failed(f"cannot be asked: {error}") from error
        if status in (401, 403):
            raise self._failed(f"answers {status}; give --prometheus_token_file with a token that may query")
        try:
            answer = json.loads(body)
            if answer["status"] == "success":
                return answer
            problem = f"{answer['errorType']}: {answer['error']}"
        except (ValueError, KeyError, TypeError) as error:
            mend = "give the URL of a Prometheus, to which /api/v1/query is added"
            raise self._failed(f"answers {status} and not as Prometheus does; {mend}") from error
        raise self._failed(f"refuses the query {promql}: {problem}")

    def _failed(self, what: str) -> ServingError:
        return ServingError(Code.UNAVAILABLE, f"Prometheus {self.url} {what}")


def _quoted(text: str) -> str:
    """A string of PromQL, whose escapes are Go's; those of JSON are among them."""
    return json.dumps(text)


def _histogram(buckets: Iterable[tuple[str, float]], per_second: float = 1.0) -> dict[float, float]:
    """Upper bound in seconds -> calls at most as slow."""
    found: dict[float, float] = defaultdict(float)
    for bound, value in buckets:
        found[float(bound) / per_second] += value
    # Each bucket is extrapolated for itself, and may come out a trace below the one before.
    bounds = sorted(found)
    return dict(zip(bounds, itertools.accumulate((found[bound] for bound in bounds), max), strict=True))
