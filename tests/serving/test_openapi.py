"""The OpenAPI description, the page made of it, and `:explain`."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from openapi_spec_validator import validate

from serving.server import ModelServer
from tests.serving.models import copy_half_plus_two, save_rich, write_model_config


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("models")
    save_rich(folder / "rich" / "3")
    copy_half_plus_two(folder / "half" / "1")
    config = write_model_config(folder, {"rich": "rich", "half plus two": "half"})
    with ModelServer(model_config_file=config) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: ModelServer) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.rest_port}/openapi.json") as response:
        return json.load(response)


def post(server: ModelServer, path: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.rest_port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def check(document: Any, path: str, part: str, value: Any) -> None:
    """See that a request or an answer fits what the document says of a path."""
    operation = document["paths"][path]["post"]
    content = operation["requestBody"] if part == "request" else operation["responses"]["200"]
    reference = content["content"]["application/json"]["schema"]["$ref"]
    schema = {"$ref": reference, "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


RICH = {"x": [1.0, 2.0], "text": "a", "id": [2**60]}
PREDICT = "/v1/models/rich:predict"


def test_document_is_valid_openapi(document: Any) -> None:
    validate(document)


def test_paths_are_those_the_models_answer(document: Any) -> None:
    verbs = {path.rpartition(":")[2] for path in document["paths"] if path.startswith("/v1/models/rich:")}
    assert verbs == {"predict", "explain"}
    verbs = {path.rpartition(":")[2] for path in document["paths"] if path.startswith("/v1/models/half%20plus%20two:")}
    assert verbs == {"predict", "classify", "regress"}
    assert {"/v1/models/rich", "/v1/models/rich/metadata"} <= set(document["paths"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PREDICT, {"instances": [RICH, RICH]}),
        (PREDICT, {"inputs": {"x": [[1, 2]], "text": [{"b64": "/w=="}], "id": [[0]]}}),
        (PREDICT, {"signature_name": "explain", "instances": [[1, 2]]}),
        ("/v1/models/rich:explain", {"instances": [{"x": [1.0, 2.0]}]}),
        ("/v1/models/half%20plus%20two:predict", {"instances": [[1.0], [2.0]]}),
        (
            "/v1/models/half%20plus%20two:regress",
            {"signature_name": "regress_x_to_y", "examples": [{"x": [1.5]}, {"x": 2.0}]},
        ),
        ("/v1/models/half%20plus%20two:classify", {"signature_name": "classify_x_to_y", "examples": [{"x": 2.0}]}),
    ],
)
def test_requests_that_fit_are_answered_as_described(server: ModelServer, document: Any, path: str, body: Any) -> None:
    check(document, path, "request", body)
    status, answer = post(server, path, body)
    assert status == 200, answer
    check(document, path, "response", answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/half%20plus%20two:predict", {"signature_name": "regress_x2_to_y3", "inputs": [[1.0, 2.0]]}),
        ("/v1/models/half%20plus%20two:predict", {"signature_name": "regress_x2_to_y3", "inputs": 1.0}),
        (PREDICT, {"instances": [{"x": [1, 2, 3], "text": "a", "id": [1, 2]}]}),
        (PREDICT, {"inputs": {"x": [[1, 2]], "text": "a", "id": 1}}),
    ],
)
def test_answers_are_as_described_also_for_other_shapes(
    server: ModelServer, document: Any, path: str, body: Any
) -> None:
    """The model takes what its signature does not say."""
    with pytest.raises(jsonschema.ValidationError):
        check(document, path, "request", body)
    status, answer = post(server, path, body)
    assert status == 200, answer
    check(document, path, "response", answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("half%20plus%20two:predict", {"signature_name": "regress_x2_to_y3", "instances": [{"inputs": [1.0]}, [2.0]]}),
        ("half%20plus%20two:classify", {"signature_name": "classify_x2_to_y3", "examples": [{"x2": 2.0}]}),
        ("half%20plus%20two:regress", {"signature_name": "regress_x_to_y", "examples": [{"x": {}}]}),
        ("half%20plus%20two:regress", {"signature_name": "regress_x_to_y", "examples": [{"x": ["a", 1]}]}),
        ("rich:explain", {"instances": [[1, 2]], "inputs": [[1, 2]]}),
        ("rich:predict", {"inputs": {"x": [], "text": [], "id": []}}),
    ],
)
def test_forms_that_no_request_has_are_refused_by_both(
    server: ModelServer, document: Any, path: str, body: Any
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(document, f"/v1/models/{path}", "request", body)
    assert post(server, f"/v1/models/{path}", body)[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"instances": []},
        {"instances": [{"x": [1, 2], "text": "a", "id": [1], "more": 1}]},
        {"instances": [{"x": [1, 2], "text": "a"}]},
        {"instances": [{"x": [1, "2"], "text": "a", "id": [1]}]},
        {"instances": [{"x": [1, 2], "text": "a", "id": [1.5]}]},
        {"signature_name": "explian", "instances": [[1, 2]]},
        {},
    ],
)
def test_requests_that_do_not_fit_are_refused_by_both(server: ModelServer, document: Any, body: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(document, PREDICT, "request", body)
    assert post(server, PREDICT, body)[0] == 400


def test_explain(server: ModelServer) -> None:
    assert post(server, "/v1/models/rich:explain", {"instances": [[1.0, 3.0]]}) == (200, {"explanations": [[2.0, 6.0]]})
    assert post(server, "/v1/models/rich/versions/3:explain", {"inputs": [[1.0, 3.0]]}) == (
        200,
        {"outputs": [[2.0, 6.0]]},
    )
    path = "/v1/models/half%20plus%20two:explain"
    assert post(server, path, {"instances": [1.0]}) == (400, {"error": f"Malformed request: POST {path}"})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chrome, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chrome is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.implicitly_wait(30)
    yield browser
    browser.quit()


@pytest.mark.slow
def test_page_sends_a_request_from_a_form(server: ModelServer, browser: Any) -> None:
    browser.get(f"http://127.0.0.1:{server.rest_port}/docs")
    forms = {
        form.find_element("tag name", "summary").text: form for form in browser.find_elements("tag name", "details")
    }
    assert {"predict: serving_default", "explain: explain", "regress: regress_x_to_y"} <= set(forms)
    form = forms["explain: explain"]
    form.find_element("tag name", "summary").click()
    field = form.find_element("name", "x")
    assert json.loads(field.get_property("value")) == [0.5, 0.5]
    field.clear()
    field.send_keys("[1, 3")
    form.find_element("tag name", "button").click()
    assert form.find_element("css selector", "pre.error").text.startswith("x is no JSON value")
    field.send_keys("]")
    form.find_element("tag name", "button").click()
    answer = form.find_element("css selector", "pre:not(.error)")
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 30).until(lambda _: "200 in" in answer.text)
    rows = json.loads(answer.text[answer.text.index("200 in") :].split("\n", 1)[1])["explanations"]
    np.testing.assert_array_equal(rows, [[2.0, 6.0]])
