"""What is wrong with a tree of settings, in words: where, what was received, what is allowed, what was meant."""

from __future__ import annotations

import dataclasses
import itertools
import math
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from components import plugins, search_space
from components.config import REFUSED_CALLBACKS, TASK_METRICS, Range, TrainConfig, TuneConfig, inherited_fields
from components.errors import ConfigError, did_you_mean

_NAMED = (("data", "source", plugins.SOURCES), ("model", "name", plugins.MODELS))
# Of an operation of `transform`, of a stage of `optimize`.
_TAGS = ("op", "method")
# Keys of earlier versions.
_MOVED = {
    "compress.num_calibration_examples": "compress.calibration.num_examples",
    "compress.metric": "verify.metric",
    "compress.on_failure": "verify.on_failure",
    "compress.max_drop": "verify.inexact.max_drop",
    "compress.min_top1_agreement": "verify.inexact.min_top1_agreement",
    "verify.max_abs_difference": "verify.exact.max_abs_difference",
    "verify.min_top1_agreement": "verify.exact.min_top1_agreement",
}
_NOT_TUNED = {
    "model.name": "the arguments of one model are not those of another; compare them in runs of their own",
    "train.callbacks": "their code is part of what the search follows from",
    "train.strategy": "the devices are set up once",
    "train.num_devices": "the devices are set up once",
    "train.num_workers": "the devices are set up once",
}
# Values of one setting; of a longer range the ends.
_MOST_TRIED = 100
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxdict = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: The setting.
        message: What is wrong with it.
        shown: Whether the message begins with the path.
    """

    path: tuple[str, ...]
    message: str
    shown: bool = True

    @property
    def dotted(self) -> str:
        """`section.key: `, or nothing for a problem of the whole."""
        return f"{'.'.join(self.path)}: " if self.path and self.shown else ""


@dataclasses.dataclass(frozen=True)
class _Place:
    """A path with the class of the section that the last key stands in, and the type expected there."""

    path: tuple[str, ...]
    section: type[BaseModel]
    expected: Any


def before_validation(tree: dict[str, Any], root: type[BaseModel]) -> list[Problem]:
    """Find what the classes do not; fields that are set from the top and empty sections are put right in `tree`."""
    problems = [Problem(path, f"{number} is not a finite number") for path, number in _not_finite(tree)]
    for name, section in _sections(root).items():
        if name in tree and tree[name] is None:
            tree[name] = {}
        for field in set(inherited_fields(section)) & set(_mapping(tree.get(name))):
            del tree[name][field]
            problems.append(Problem((name, field), f"this is set at the top of the file: write '{field}:' there"))
    if isinstance(tune := tree.get("tune"), dict) and isinstance(space := tune.get("space"), dict):
        tune["space"] = dict(_dotted(space))
    return [*problems, *_unknown_names(tree), *_unknown_metrics(tree), *_only_for_classes(tree)]


def of_validation(error: ValidationError, tree: Mapping[str, Any], root: type[BaseModel]) -> Iterator[Problem]:
    """The problems that a validation found, beside those that `before_validation` tells."""
    for details in error.errors(include_url=False):
        received = details["input"]
        if not (isinstance(received, float) and not math.isfinite(received)):
            yield _in_words(details, _place(details["loc"], root), root)


def of_search_space(tune: TuneConfig) -> Iterator[Problem]:
    """What no trial of a search could be trained with, found by trying every value, and the ends of any two ranges."""
    paths = [".".join(("train", *path)) for path in _all_paths(TrainConfig)]
    misplaced = {path: message for path in tune.space if (message := _why_not_to_be_tuned(path, tune.space, paths))}
    yield from (_of_space(path, message) for path, message in misplaced.items())
    if misplaced:
        return
    first = {path: search_space.ends_of(candidates)[0] for path, candidates in tune.space.items()}
    refused = set()
    for path, candidates in tune.space.items():
        values = search_space.values_of(candidates)
        for value in search_space.ends_of(candidates) if values is None or len(values) > _MOST_TRIED else values:
            if message := _why_refused(tune.train, first, {path: value}):
                refused.add(path)
                yield _of_space(path, message)
    for one, other in itertools.combinations([path for path in tune.space if path not in refused], 2):
        for pair in itertools.product(*(search_space.ends_of(tune.space[path]) for path in (one, other))):
            if message := _why_refused(tune.train, first, dict(zip((one, other), pair, strict=True))):
                yield _of_space(other, message)


def _of_space(path: str, message: str) -> Problem:
    return Problem(("tune", "space", path), message)


def _why_not_to_be_tuned(path: str, space: Mapping[str, Any], known: Sequence[str]) -> str | None:
    if path in _NOT_TUNED:
        return f"this cannot differ from trial to trial: {_NOT_TUNED[path]}"
    if above := next((other for other in space if path.startswith(f"{other}.")), None):
        return f"this is a part of '{above}', which is in the space, too: leave out one of them"
    if path.startswith("model.args.") and all(path.split(".")):
        return None
    if path in known:
        return None
    if path.partition(".")[0] not in ("train", "model"):
        return "only settings of train and model are tuned: the data is prepared once, before the trials"
    return f"there is no such setting.{did_you_mean(path, [*known, 'model.args.'])}"


def _why_refused(train: TrainConfig, others: Mapping[str, Any], tried: Mapping[str, Any]) -> str | None:
    try:
        search_space.with_settings(train, {**others, **tried})
    except ValidationError as error:
        problem = next(of_validation(error, {}, TrainConfig))
        values = " and ".join(f"{path} {value!r}" for path, value in tried.items())
        return f"with {values}: {problem.message}"
    return None


def _dotted(space: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """A search space whose paths may be nested, as overrides write them, with dotted ones."""
    for key, value in space.items():
        if isinstance(value, Mapping) and not value.keys() & Range.model_fields.keys():
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _unknown_names(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Names of code that are no built-in ones and no import paths."""
    named: list[tuple[tuple[str, ...], Any, dict[str, str]]] = [
        ((section, field), _mapping(tree.get(section)).get(field), table) for section, field, table in _NAMED
    ]
    callbacks = _mapping(tree.get("train")).get("callbacks")
    for number, callback in enumerate(callbacks if isinstance(callbacks, list) else []):
        path = ("train", "callbacks", str(number), "name")
        named.append((path, _mapping(callback).get("name"), plugins.CALLBACKS))
    for place, value, table in named:
        if isinstance(value, str) and value not in REFUSED_CALLBACKS and (message := _unknown_name(value, table)):
            yield Problem(place, message)


def _unknown_name(value: str, table: dict[str, str]) -> str | None:
    try:
        plugins.target(value, table, "")
    except ConfigError as error:
        return str(error).removeprefix(": ").removesuffix(".")
    return None


def _unknown_metrics(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Metrics that the task does not have; a step would find them only after the training."""
    task = _mapping(tree.get("data")).get("task", "multiclass")
    if not isinstance(task, str) or (known := TASK_METRICS.get(task)) is None:
        return
    for path, metric in _metrics_asked_for(tree):
        if isinstance(metric, str) and metric not in known:
            yield Problem(path, f"a {task} task has no metric '{metric}'.{did_you_mean(metric, known)}".rstrip("."))


def _only_for_classes(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Options of the training that nothing reads where the label is a number."""
    if _mapping(tree.get("data")).get("task") != "regression":
        return
    train = _mapping(tree.get("train"))
    for field, default in (("class_weights", "none"), ("label_smoothing", 0)):
        if (value := train.get(field, default)) != default:
            yield Problem(("train", field), f"a regression task has no classes: leave it out, received {_show(value)}")


def _metrics_asked_for(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for section, field in (("train", "early_stopping"), ("evaluate", "champion")):
        yield (section, field, "metric"), _mapping(_mapping(tree.get(section)).get(field)).get("metric")
    thresholds = _mapping(tree.get("evaluate")).get("thresholds")
    for number, threshold in enumerate(thresholds if isinstance(thresholds, list) else []):
        yield ("evaluate", "thresholds", str(number), "metric"), _mapping(threshold).get("metric")
    for section in ("tune", "verify"):
        yield (section, "metric"), _mapping(tree.get(section)).get("metric")


def _not_finite(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _not_finite(inner, (*path, str(key)))


def _in_words(details: ErrorDetails, place: _Place, root: type[BaseModel]) -> Problem:
    kind, received, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        if moved := _MOVED.get(".".join(place.path)):
            return Problem(place.path, f"this is now '{moved}'")
        return Problem(place.path, f"there is no such key.{_nearest_key(place, root)}")
    if kind == "missing":
        field = _fields(place.section)[place.path[-1]]
        about = f": {field.description}" if field.description else ""
        return Problem(place.path, f"this is required and not set{about}".rstrip("."))
    if kind == "literal_error":
        return Problem(place.path, _not_among(received, get_args(place.expected)))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = list(_tagged(place.expected))
        name = context["discriminator"].strip("'")
        if kind == "union_tag_invalid":
            return Problem((*place.path, name), _not_among(context["tag"], tags))
        return Problem(place.path, f"'{name}' is missing, one of: {', '.join(tags)}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = f" with keys from: {', '.join(_fields(place.expected))}" if _is_section(place.expected) else ""
        return Problem(place.path, f"expected a section{keys}; received {_show(received)}")
    if kind == "value_error":
        return Problem(place.path, str(context["error"]))
    expected = details["msg"].replace("Input should be", "expected", 1).replace("Input should have", "expected", 1)
    hint = ": write it in quotes" if kind == "string_type" and isinstance(received, int | float) else ""
    expected = expected[:1].lower() + expected[1:]
    return Problem(place.path, f"{expected}; received {_show(received)}{hint}")


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    kind = "the section " if isinstance(value, Mapping) else "the list " if isinstance(value, list) else ""
    return kind + _repr.repr(value)


def _not_among(received: Any, allowed: Sequence[Any]) -> str:
    names = [str(name) for name in allowed]
    meant = did_you_mean(str(received), names)
    meant = meant if "Did you mean" in meant else ""
    return f"{received!r} is none of: {', '.join(names)}.{meant}"


def _nearest_key(place: _Place, root: type[BaseModel]) -> str:
    key = place.path[-1]
    meant = did_you_mean(key, _fields(place.section))
    elsewhere = [] if "Did you mean" in meant else [path for path in _all_paths(root) if path[-1] == key]
    if elsewhere:
        return f" Did you mean {' or '.join(repr('.'.join(path)) for path in elsewhere)}?"
    return meant


def _all_paths(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in _fields(section).items():
        yield (*above, name)
        inner = _bare(field.annotation)
        if _is_section(inner):
            yield from _all_paths(inner, (*above, name))


def _sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {name: field.annotation for name, field in _fields(root).items() if _is_section(field.annotation)}


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    """The keys that a section may have in a file."""
    hidden = inherited_fields(section)
    return {field.alias or name: field for name, field in section.model_fields.items() if name not in hidden}


def _place(location: Sequence[str | int], root: type[BaseModel]) -> _Place:
    """Follow a location of pydantic's, which has the tags of unions between the keys."""
    path: list[str] = []
    section: Any = root
    expected: Any = root
    for key in location:
        tagged = _tagged(expected)
        if key in tagged:
            expected = tagged[key]
            continue
        if key == "[key]":
            continue
        path.append(str(key))
        if _is_section(expected):
            section = expected
            expected = _bare(_fields(section)[key].annotation) if key in _fields(section) else Any
        else:
            expected = _bare(_item_type(expected))
    return _Place(tuple(path), section, expected)


def _item_type(expected: Any) -> Any:
    arguments = get_args(expected)
    return arguments[-1] if arguments else Any


def _bare(annotation: Any) -> Any:
    """A type without `Annotated` and `| None`."""
    while True:
        arguments = get_args(annotation)
        if get_origin(annotation) is Annotated:
            annotation = arguments[0]
        elif get_origin(annotation) in (Union, types.UnionType) and types.NoneType in arguments:
            annotation = next(each for each in arguments if each is not types.NoneType)
        else:
            return annotation


def _tagged(annotation: Any) -> dict[Any, type[BaseModel]]:
    """Tag -> class of a union that a field of `_TAGS` tells apart; empty for other types."""
    bare = _bare(annotation)
    if get_origin(bare) not in (Union, types.UnionType):
        return {}
    return {
        get_args(each.model_fields[tag].annotation)[0]: each
        for each in get_args(bare)
        for tag in _TAGS
        if _is_section(each) and tag in each.model_fields
    } | {part.tag: _bare(each) for each in get_args(bare) for part in get_args(each) if isinstance(part, Tag)}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
