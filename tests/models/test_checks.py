import pytest

from models.checks import check_fraction, check_output_spec, check_positive, check_positives, describe, is_dense
from models.spec import FeatureSpec, OutputSpec


@pytest.mark.parametrize(
    "output", [OutputSpec("binary", 2), OutputSpec("regression", 1), OutputSpec("multiclass", 2)], ids=str
)
def test_accepts_outputs(output):
    check_output_spec(output)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (OutputSpec("multiclass", 1), "num_classes of 2 or more, received 1"),
        (OutputSpec("binary", 3), "a binary task has num_classes=2, received 3: is the task 'multiclass'?"),
        (OutputSpec("regression", 2), "a regression task has num_classes=1, received 2"),
        (OutputSpec("ranking", 2), "unknown task 'ranking': use 'binary', 'multiclass' or 'regression'"),
    ],
    ids=str,
)
def test_refuses_outputs(output, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        check_output_spec(output)


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_refuses_what_is_not_a_positive_integer(value):
    with pytest.raises(ValueError, match="width must be an integer of 1 or more, received"):
        check_positive("width", value)


@pytest.mark.parametrize("values", [[], 3, "34"])
def test_refuses_what_is_not_a_list(values):
    with pytest.raises(ValueError, match="widths must be a non-empty list"):
        check_positives("widths", values)


def test_names_the_wrong_element():
    with pytest.raises(ValueError, match=r"widths\[1\] must be an integer of 1 or more, received 0"):
        check_positives("widths", [4, 0])


def test_lists_become_tuples():
    assert check_positives("widths", [4, 8]) == (4, 8)


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, "0.5", True, float("nan")])
def test_refuses_fractions(value):
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\), received"):
        check_fraction("dropout", value)


def test_dense_features():
    assert is_dense(FeatureSpec((3,), "float32"))
    assert not is_dense(FeatureSpec((None,), "float32"))
    assert not is_dense(FeatureSpec((3, 3), "float32"))
    assert not is_dense(FeatureSpec((3,), "int64", num_categories=4))


def test_describes_specs():
    spec = {"b": FeatureSpec((4,), "int64", num_categories=9, is_sequence=True), "a": FeatureSpec((1,), "float32")}
    assert describe(spec) == "a: float32 (1,), b: int64 (4,), 9 categories, sequence"
    assert describe({}) == "no features"
