"""Notifications, received by real HTTP and SMTP servers on this machine."""

from __future__ import annotations

import email.policy
import ssl
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from components.config import NotifyConfig
from pipelines import notify as module
from pipelines.local import RunResult, StepRun, run
from pipelines.notify import Ending, ending_of, notify
from tests.pipelines import fakes

FAILED = Ending(
    name="taxi",
    state="failed",
    step="train",
    reasons=("loss <NaN> & no end",),
    metrics={"auc": 0.9123},
    run="r-1",
    link="https://kubeflow.example/#/runs/details/r-1",
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 0)


class _Mailbox:
    """Takes mail for everybody but `nobody@`."""

    def __init__(self) -> None:
        self.messages: list[tuple[list[str], EmailMessage]] = []
        self.logins: list[bytes] = []

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any) -> str:  # noqa: N802
        if address.startswith("nobody@"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        self.messages.append((envelope.rcpt_tos, message))
        return "250 OK"

    def authenticate(self, _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> AuthResult:
        self.logins.append(data.login)
        return AuthResult(success=(data.login, data.password) == (b"mailer", b"pa ss"), handled=False)


class _Server(Controller):
    """A mail server on a free port."""

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@pytest.fixture
def mailbox() -> _Mailbox:
    return _Mailbox()


@pytest.fixture
def certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ssl.SSLContext:
    """That of a server on localhost, which clients in this test trust."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture
def smtp(mailbox: _Mailbox, certificate: ssl.SSLContext) -> Iterator[Controller]:
    """A mail server that takes mail after STARTTLS and a login only."""
    controller = _Server(
        mailbox,
        hostname="localhost",
        port=0,
        tls_context=certificate,
        require_starttls=True,
        auth_required=True,
        authenticator=mailbox.authenticate,
    )
    controller.start()
    yield controller
    controller.stop()


def _mail(port: int, **changed: Any) -> dict[str, Any]:
    settings = {"host": "localhost", "port": port, "sender": "headrace@example.com", "recipients": ["ann@example.com"]}
    return {"email": settings | {"user": "mailer", "password": "$SMTP_PASSWORD"} | changed}


def test_a_webhook_gets_the_end_as_json(hook: Any) -> None:
    assert notify(NotifyConfig(webhook=hook.url), FAILED) == []
    [(path, body)] = hook.received
    assert path == "/services/T0/secret"
    assert body == {
        "text": "taxi failed in step train\nloss <NaN> & no end\nTest split: auc 0.9123\nRun: r-1\n"
        "https://kubeflow.example/#/runs/details/r-1",
        "name": "taxi",
        "state": "failed",
        "step": "train",
        "reasons": ["loss <NaN> & no end"],
        "metrics": {"auc": 0.9123},
        "run": "r-1",
        "link": "https://kubeflow.example/#/runs/details/r-1",
    }


def test_slack_gets_blocks_with_its_special_characters_escaped(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_URL", hook.url)
    assert notify(NotifyConfig(slack="$SLACK_URL"), FAILED) == []
    [(_, body)] = hook.received
    texts = [block["text"] for block in body["blocks"]]
    assert body["text"] == "taxi failed in step train"
    assert {text["type"] for text in texts} == {"mrkdwn"}
    assert texts[0]["text"] == "*taxi failed in step train*"
    assert texts[1]["text"].startswith("loss &lt;NaN&gt; &amp; no end\nTest split")


def test_a_long_error_fits_into_a_slack_message(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_URL", hook.url)
    long = Ending("taxi", "failed", "train", ("x" * 9000,), {}, "r-1", None)
    assert notify(NotifyConfig(slack="$SLACK_URL"), long) == []
    assert len(hook.received[0][1]["blocks"][1]["text"]["text"]) < 3000


def test_a_server_that_is_busy_is_asked_again(hook: Any) -> None:
    hook.answers += [503, 429]
    assert notify(NotifyConfig(webhook=hook.url), FAILED) == []
    assert len(hook.received) == 3


@pytest.mark.parametrize(
    ("status", "text"), [(404, "the webhook answered 404 Not Found"), (302, "the webhook answered 302 Found")]
)
def test_what_is_no_success_is_said_without_the_secret_address(hook: Any, status: int, text: str) -> None:
    hook.answers.append(status)
    assert notify(NotifyConfig(webhook=hook.url), FAILED) == [f"notify.webhook failed: {text}"]
    assert [path for path, _ in hook.received] == ["/services/T0/secret"]


def test_no_answer_is_said_without_the_secret_address() -> None:
    [failure] = notify(NotifyConfig(webhook="http://127.0.0.1:1/services/T0/secret"), FAILED)
    assert failure.startswith("notify.webhook failed: no answer: Failed to establish a new connection: [Errno ")
    assert "T0" not in failure


@pytest.mark.parametrize("address", ["nonsense", "ftp://example.com/secret", "http://[::1/secret"])
def test_a_secret_that_is_no_address_is_said_and_kept(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", address)
    failures = notify(NotifyConfig(webhook="$HOOK"), FAILED)
    assert failures == ["notify.webhook failed: that is no address of a web server"]


def test_one_that_cannot_be_told_keeps_nobody_else_from_it(hook: Any) -> None:
    config = NotifyConfig(webhook=hook.url, slack="$NO_SUCH_VARIABLE", email=_mail(1)["email"])
    failures = notify(config, FAILED)
    assert failures[0] == "notify.slack failed: the environment variable NO_SUCH_VARIABLE is not set"
    assert failures[1].startswith("notify.email failed: [Errno ")
    assert len(hook.received) == 1


def test_an_end_that_nobody_asked_for_is_not_told(hook: Any) -> None:
    config = NotifyConfig(webhook=hook.url, when=["succeeded", "cancelled"])
    assert notify(config, FAILED) == []
    assert hook.received == []


def test_mail_goes_out_encrypted_after_a_login(
    smtp: Controller, mailbox: _Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", "pa ss")
    config = NotifyConfig.model_validate(_mail(smtp.port, recipients=["ann@example.com", "bob@example.com"]))
    assert notify(config, FAILED) == []
    [(recipients, message)] = mailbox.messages
    assert recipients == ["ann@example.com", "bob@example.com"]
    assert message["Subject"] == "[headrace] taxi failed in step train"
    assert (message["From"], message["To"]) == ("headrace@example.com", "ann@example.com, bob@example.com")
    assert "loss <NaN> & no end\nTest split: auc 0.9123" in message.get_content().replace("\r\n", "\n")
    assert mailbox.logins == [b"mailer"]


def test_mail_over_tls_from_the_start(
    mailbox: _Mailbox, certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = _Server(mailbox, hostname="localhost", port=0, ssl_context=certificate)
    controller.start()
    try:
        config = _mail(controller.port, security="tls", user=None, password=None)
        assert notify(NotifyConfig.model_validate(config), FAILED) == []
    finally:
        controller.stop()
    assert len(mailbox.messages) == 1


@pytest.mark.parametrize(
    ("password", "recipients", "text"),
    [
        ("wrong", ["ann@example.com"], "notify.email failed: (535, b'5.7.8 Authentication credentials invalid')"),
        ("pa ss", ["ann@example.com", "nobody@example.com"], "the mail server refused nobody@example.com"),
        ("pa ss", ["nobody@example.com"], "no such user"),
    ],
)
def test_a_mail_server_that_refuses_is_said(
    smtp: Controller, monkeypatch: pytest.MonkeyPatch, password: str, recipients: list[str], text: str
) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", password)
    [failure] = notify(NotifyConfig.model_validate(_mail(smtp.port, recipients=recipients)), FAILED)
    assert text in failure


def test_a_mail_server_that_nobody_vouches_for_gets_no_password(
    smtp: Controller, mailbox: _Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", "pa ss")
    monkeypatch.delenv("SSL_CERT_FILE")
    [failure] = notify(NotifyConfig.model_validate(_mail(smtp.port)), FAILED)
    assert "CERTIFICATE_VERIFY_FAILED" in failure
    assert mailbox.logins == []


STEPS = [
    StepRun("ingest", "done", 1.0, {}),
    StepRun("evaluate", "done", 1.0, fakes.EVALUATION | {"reasons": ["failed: auc"]}),
]


@pytest.mark.parametrize(
    ("exit_code", "more", "state", "step", "reasons"),
    [
        (0, [], "succeeded", None, ()),
        (3, [], "not_blessed", None, ("failed: auc",)),
        (1, [StepRun("push", "failed", 0.1, None, ("disk full",))], "failed", "push", ("disk full",)),
        (2, [StepRun("push", "failed", 0.1, None, ("no such",))], "failed", "push", ("no such",)),
        (
            130,
            [StepRun("push", "failed", 0.1, None, ("KeyboardInterrupt",))],
            "cancelled",
            "push",
            ("KeyboardInterrupt",),
        ),
    ],
)
def test_the_end_of_a_run(exit_code: int, more: list[StepRun], state: str, step: str | None, reasons: Any) -> None:
    config = NotifyConfig(name="taxi", link="https://k/{run_id}")
    ending = ending_of(RunResult(Path("runs/taxi"), [*STEPS, *more], exit_code), config, "r-1")
    assert (ending.state, ending.step, ending.reasons) == (state, step, reasons)
    assert (ending.metrics, ending.link) == ({"auc": 0.94, "loss": 0.33}, "https://k/r-1")


def test_a_run_on_this_machine_tells_of_its_end_and_keeps_its_exit_code(
    hook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_all(output: Any, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        raise OSError("no space")

    config = fakes.config_of(notify={"webhook": hook.url, "slack": "$NO_SUCH_VARIABLE"})
    options: dict[str, Any] = {"runs_dir": tmp_path, "console": fakes.quiet()}
    blessed = run(config, steps=fakes.table(), **options)
    refused = run(config, steps=fakes.table(*[fakes.write_words] * 2, fakes.refuse), force=["judge"], **options)
    with pytest.raises(OSError, match="no space"):
        run(config, steps=fakes.table(refuse_all), force=["make"], **options)
    assert (blessed.exit_code, refused.exit_code) == (0, 3)
    assert [(body["state"], body["step"], body["run"]) for _, body in hook.received] == [
        ("succeeded", None, str(tmp_path / "tiny")),
        ("not_blessed", None, str(tmp_path / "tiny")),
        ("failed", "make", str(tmp_path / "tiny")),
    ]
    warning = "Warning: notify.slack failed: the environment variable NO_SUCH_VARIABLE is not set"
    assert capsys.readouterr().err.count(warning) == 3
