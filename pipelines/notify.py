"""Tells people and programs how a run ended: a webhook, a chat, e-mail. What cannot be sent is said, and hides nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipelines.exits import INTERRUPTED
from pipelines.local import NOT_BLESSED, RunResult

if TYPE_CHECKING:
    from components.config import EmailConfig, NotifyConfig

_SECONDS = 30
_BACKOFF_SECONDS = 0.5
# A section of a Slack message holds 3000 characters (https://api.slack.com/reference/block-kit/blocks#section).
_LONGEST = 2500
_STATES = {0: "succeeded", NOT_BLESSED: "not_blessed", INTERRUPTED: "cancelled"}


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        name: The experiment.
        state: succeeded, not_blessed, failed or cancelled.
        step: The step that failed or was cancelled, where it is known.
        reasons: Why it failed, or was not blessed.
        metrics: Of the test split.
        run: Its folder, or its id on Kubeflow.
        link: Where to look.
    """

    name: str
    state: str
    step: str | None
    reasons: tuple[str, ...]
    metrics: dict[str, float]
    run: str
    link: str | None

    @property
    def headline(self) -> str:
        """The end in one line."""
        where = f" in step {self.step}" if self.step else ""
        return f"{self.name} {self.state.replace('_', ' ')}{where}"

    @property
    def details(self) -> str:
        """The reasons, the metrics and where to look, a line each."""
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        lines = (*self.reasons, f"Test split: {metrics}" if metrics else "", f"Run: {self.run}", self.link or "")
        return "\n".join(line for line in lines if line)


def ending_of(result: RunResult, config: NotifyConfig, run: str) -> Ending:
    """How a run ended.

    Args:
        result: What became of each step.
        config: Whom to tell, and of what.
        run: The run's folder, or its id on Kubeflow.
    """
    state = _STATES.get(result.exit_code, "failed")
    failed = next((step for step in result.steps if step.state == "failed"), None)
    evaluation = result.result_of("evaluate") or {}
    if state == "not_blessed":
        reasons = tuple(reason for reason in evaluation.get("reasons", ()) if not reason.startswith("passed"))
    else:
        reasons = failed.reasons if failed else ()
    measured = evaluation.get("metrics", {}).get("test", {})
    return Ending(
        name=config.name,
        state=state,
        step=failed.name if failed else None,
        reasons=reasons,
        metrics={name: value for name, value in measured.items() if value is not None},
        run=run,
        link=config.link and config.link.replace("{run_id}", run),
    )


def notify(config: NotifyConfig, ending: Ending) -> list[str]:
    """Tell everyone of `config` who wants to know of this end.

    Returns:
        What could not be sent, one line each. Nothing is raised: the run's own end is what counts.
    """
    if ending.state not in config.when:
        return []
    targets: dict[str, tuple[Any, Callable[[Any, Ending], None]]] = {
        "webhook": (config.webhook, _post_ending),
        "slack": (config.slack, _post_to_slack),
        "email": (config.email, _mail),
    }
    failures = []
    for name, (target, send) in targets.items():
        try:
            if target is not None:
                send(target, ending)
        except Exception as error:
            expected = isinstance(error, OSError | ValueError)
            failures.append(f"notify.{name} failed: {error if expected else f'{type(error).__name__}: {error}'}")
    return failures


def post(url: str, fields: Mapping[str, Any]) -> None:
    """Post JSON; a server that is not there or too busy is asked again.

    Args:
        url: The address, or $NAME: the environment variable that holds it.
        fields: What is posted.

    Raises:
        OSError: there is no answer, or it is no success; the address, which may be a secret, is not told.
        ValueError: the environment variable is not set, or the address is none.
    """
    import urllib3

    # What was sent once is not sent again, so that nothing arrives twice, and no login page is taken for an answer.
    retries = urllib3.Retry(
        total=3,
        read=0,
        redirect=False,
        backoff_factor=_BACKOFF_SECONDS,
        status_forcelist=(429, 503),
        respect_retry_after_header=False,
        allowed_methods=None,
        raise_on_status=False,
    )
    address = _value_of(url)
    try:
        if not address.startswith(("http://", "https://")):
            raise urllib3.exceptions.LocationValueError
        answer = urllib3.request("POST", address, json=fields, timeout=_SECONDS, retries=retries, redirect=False)
    except urllib3.exceptions.LocationValueError as error:
        raise ValueError("that is no address of a web server") from error
    except urllib3.exceptions.HTTPError as error:
        # Of what urllib3 says, the outermost error has the whole address, the innermost no more than the host.
        reason = str(getattr(error, "reason", None) or error).rpartition("): ")[2]
        raise OSError(f"no answer: {reason}") from error
    if not 200 <= answer.status < 300:
        raise OSError(f"the webhook answered {answer.status} {answer.reason}")


def _value_of(text: str) -> str:
    """A text, or what the environment variable holds that it names."""
    name = text.removeprefix("$")
    if name == text:
        return text
    if not (value := os.environ.get(name, "")):
        raise ValueError(f"the environment variable {name} is not set")
    return value


def _post_ending(url: str, ending: Ending) -> None:
    post(url, {"text": f"{ending.headline}\n{ending.details}", **dataclasses.asdict(ending)})


def _post_to_slack(url: str, ending: Ending) -> None:
    """Slack's own shape (https://api.slack.com/messaging/webhooks), which Mattermost and Rocket.Chat take, too."""
    texts = [f"*{_escaped(ending.headline)}*", _escaped(ending.details)[:_LONGEST]]
    blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    post(url, {"text": ending.headline, "blocks": blocks})


def _escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text


def _mail(config: EmailConfig, ending: Ending) -> None:
    import smtplib
    import ssl
    from email.message import EmailMessage

    message = EmailMessage()
    message["Subject"] = f"[headrace] {ending.headline}"
    message["From"] = config.sender
    message["To"] = ", ".join(config.recipients)
    message.set_content(f"{ending.headline}\n\n{ending.details}\n")
    context = ssl.create_default_context()
    with (
        smtplib.SMTP_SSL(config.host, config.port, timeout=_SECONDS, context=context)
        if config.security == "tls"
        else smtplib.SMTP(config.host, config.port, timeout=_SECONDS)
    ) as server:
        if config.security == "starttls":
            server.starttls(context=context)
        if config.user is not None and config.password is not None:
            server.login(_value_of(config.user), _value_of(config.password))
        if refused := server.send_message(message):
            raise OSError(f"the mail server refused {', '.join(refused)}")
