"""Arguments that a job gives to what it names: their bounds, their types, and which paths they can stand for."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field
from torch import nn

from fedring.train.bounds import MAX_JOB_BYTES, MAX_WHOLE
from fedring.train.errors import SeamError
from fedring.train.names.arguments import MAX_LISTS, MAX_TEXT, MAX_VALUES, check_arguments, read_arguments


def anything(**values: Any) -> None:
    """A function that takes whatever a job gives it."""


def check(function: Callable[..., Any], args: Mapping[str, Any], *, given: int = 0, root: Path | None = None) -> Any:
    return check_arguments("my:part", function, args, given=given, root=root)


def refusal(function: Callable[..., Any], args: Mapping[str, Any], **more: Any) -> SeamError:
    with pytest.raises(SeamError, match=r"^my:part") as caught:
        check(function, args, **more)
    assert str(caught.value).isprintable(), "an error goes to the server and into logs"
    assert len(str(caught.value)) < 2000
    return caught.value


def unreadable(text: str) -> SeamError:
    with pytest.raises(SeamError) as caught:
        read_arguments(text)
    assert caught.value.reason == "bad_argument"
    return caught.value


@pytest.mark.parametrize(
    ("text", "table"),
    [("", {}), ("{}", {}), ('{"hidden": 3}', {"hidden": 3}), (' {"a": [1, {"b": null}]} ', {"a": [1, {"b": None}]})],
)
def test_arguments_are_a_table_in_json_or_nothing(text: str, table: dict[str, Any]) -> None:
    assert read_arguments(text) == table


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(("[1]", "are a list and not a table"), ("3", "are a int"), ('"x"', "are a str"), ("null", "are a NoneType")),
        *(
            ("{", "are not JSON"),
            ("{'a': 1}", "are not JSON"),
            ("__import__('os')", "are not JSON"),
            ("{}{}", "are not JSON"),
        ),
        ('{"a": ' + "[" * (MAX_JOB_BYTES // 2), "are not JSON: too many lists and tables in each other"),
        ("[" * (MAX_JOB_BYTES - 1), "are not JSON: too many lists and tables in each other"),
        ('{"a":' * (MAX_JOB_BYTES // 6), "are not JSON: too many lists and tables in each other"),
        ('{"a": ' + "1" * 5000 + "}", "are not JSON: Exceeds the limit"),
        ("[" * 100_000, f"are 100000 characters, above {MAX_JOB_BYTES}"),
        (json.dumps({"a": "x" * MAX_JOB_BYTES}), "characters, above"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_table_in_json_is_refused(text: str, sentence: str) -> None:
    assert sentence in str(unreadable(text))


VALUES = [0, -3, True, 0.5, "text", "", "a.b-c_d e", None, MAX_WHOLE, -MAX_WHOLE, 1e300, [], {}, [1, "a", None]]
VALUES += [[[1], [2]], {"a": 1, "b": [1, 2]}, "x" * MAX_TEXT, [0] * (MAX_VALUES - 1), "größe", "..."]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:30])
def test_numbers_booleans_texts_and_lists_and_tables_of_these_are_passed_on_as_they_are(value: object) -> None:
    assert check(anything, {"value": value}) == {"value": value}


def nested(levels: int) -> Any:
    """Return a number in so many lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


TABLES_WITHIN: list[Any] = [{"a": {}}, [{}], {"a": [{}]}, [[{"b": 1}]]]
NOT_OF_JSON: list[Any] = [b"x", 3j, {1}, print, object, Path("x")]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        *((2**70, "is beyond 2^63 - 1"), (-(2**70), "is beyond 2^63 - 1"), (MAX_WHOLE + 1, "is beyond 2^63 - 1")),
        *((float("nan"), "is nan, and not a finite number"), (float("inf"), "is inf"), (float("-inf"), "is -inf")),
        *(([0, [float("nan")]], "is nan"), ({"a": 2**70}, "beyond"), ({"a": float("inf")}, "is inf")),
        ("x" * (MAX_TEXT + 1), f"has {MAX_TEXT + 1} characters, above {MAX_TEXT}"),
        *(
            (text, "holds a character that cannot be printed")
            for text in ("a\nb", "\0", "a\x1b[2J", "\ud800", "\u202e")
        ),
        ([0] * MAX_VALUES, f"is given more than {MAX_VALUES} values"),
        ([[0] * 100] * 100, f"is given more than {MAX_VALUES} values"),
        ({str(number): 0 for number in range(MAX_VALUES)}, f"is given more than {MAX_VALUES} values"),
        (nested(MAX_LISTS + 1), f"has more than {MAX_LISTS} levels"),
        (nested(100_000), f"has more than {MAX_LISTS} levels"),
        *((value, "holds a table within another value") for value in TABLES_WITHIN),
        *((value, f"is a {type(value).__name__}") for value in NOT_OF_JSON),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, list) else f"a list of {len(value)}",
)
def test_what_is_too_large_too_deep_or_no_such_value_is_refused(value: object, sentence: str) -> None:
    error = refusal(anything, {"value": value})
    assert error.reason == "bad_argument"
    assert sentence in str(error)


def test_all_arguments_of_a_call_count_together() -> None:
    most = {f"a{number}": [0] * 999 for number in range(MAX_VALUES // 1000)}
    assert check(anything, most) == most
    assert "more than" in str(refusal(anything, {**most, "one_more": 0}))


@pytest.mark.parametrize("key", ["k" * 300, "a\nb", "\0", "\ud800", "\x1b[2J"], ids=lambda key: ascii(key)[:10])
def test_keys_are_short_and_hold_only_characters_that_can_be_printed(key: str) -> None:
    for table in ({key: 1}, {"a": {key: 1}}, {key: {"a": {"b": 1}}}):
        error = refusal(anything, table)
        assert error.reason == "bad_argument"
        assert "it is too long, or not printable" in str(error)


def net(hidden: int = 3, *, scale: float = 1.0, name: str = "", wide: bool = False) -> None:
    """A function with some parameters."""


class Rule:
    """A class whose arguments are those of its constructor."""

    def __init__(self, least: float = 0.0) -> None: ...


class Sized(nn.Module):
    """A module of torch."""

    def __init__(self, hidden: int) -> None: ...


@functools.lru_cache
def cached(hidden: int) -> None:
    """A function with a cache."""


def only_by_position(hidden: int, /) -> None:
    """A function whose parameter has no name outside."""


@pytest.mark.parametrize(
    ("function", "args", "sentence"),
    [
        (net, {"hiden": 3}, "cannot be called with {'hiden': 3}: got an unexpected keyword argument 'hiden'."),
        (net, {"self": 3}, "unexpected"),
        (Rule, {"most": 1}, "unexpected"),
        (Rule, {"self": 1}, "unexpected"),
        (Sized, {}, "missing a required argument: 'hidden'"),
        (cached, {}, "missing a required argument: 'hidden'"),
        (only_by_position, {"hidden": 3}, "positional"),
        (print, {"sep": 3, "colour": 1}, "unexpected"),
        (dict.fromkeys, {"iterable": []}, ""),
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused(
    function: Callable[..., Any], args: dict[str, Any], sentence: str
) -> None:
    error = refusal(function, args)
    assert error.reason == "bad_argument"
    assert sentence in str(error)


def records(root: Path | None, download: bool, count: int = 3) -> None:
    """A data set."""


@pytest.mark.parametrize("args", [{"root": "x"}, {"download": True}, {"root": None, "count": 1}])
def test_an_argument_that_is_given_by_position_cannot_be_given_again(args: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(records, args, given=2, root=tmp_path)
    assert error.reason == "bad_argument"
    assert "multiple values for argument" in str(error)
    assert check(records, {"count": 5}, given=2) == {"count": 5}


class Long(Enum):
    """A choice whose description is long."""

    ONLY = "x" * 100_000


def typed(  # type: ignore[no-untyped-def]  # one parameter has no type
    whole: int = 0,
    number: float = 0.0,
    flag: bool = False,
    text: str = "",
    sizes: Sequence[int] = (),
    pair: tuple[int, float] = (0, 0.0),
    shapes: Mapping[str, Sequence[int]] | None = None,
    maybe: Optional[int] = None,  # noqa: UP045  # users write so
    either: int | str = 0,
    choice: Literal["relu", "tanh"] = "relu",
    most: Annotated[int, Field(le=10)] = 0,
    long: Long | None = None,
    layer: nn.Module | None = None,
    free: Any = None,
    function: Callable[[], None] | None = None,
    unsaid=None,
    evaluated: "int" = 0,
) -> None:
    """A function with parameters of many types."""


@pytest.mark.parametrize(
    ("args", "result"),
    [
        ({"whole": 3}, 3),
        ({"number": 3}, 3.0),
        ({"number": 0.5}, 0.5),
        ({"flag": True}, True),
        ({"text": "a"}, "a"),
        ({"sizes": [1, 2]}, [1, 2]),
        ({"pair": [1, 2]}, (1, 2.0)),
        ({"shapes": {"a": [1]}}, {"a": [1]}),
        ({"shapes": None}, None),
        ({"maybe": None}, None),
        ({"maybe": 3}, 3),
        ({"either": "a"}, "a"),
        ({"choice": "tanh"}, "tanh"),
        ({"most": 10}, 10),
        ({"layer": None}, None),
        ({"free": [1, "a"]}, [1, "a"]),
        ({"unsaid": {"a": 1}}, {"a": 1}),
        ({"evaluated": 3}, 3),
    ],
    ids=str,
)
def test_arguments_have_the_types_that_a_function_declares(args: dict[str, Any], result: object) -> None:
    (value,) = check(typed, args).values()
    assert value == result
    assert type(value) is type(result)


OTHER_TYPES: dict[str, list[Any]] = {
    "whole": ["3", 0.5, True, None, [3], {"a": 3}],
    "number": ["0.5", True, None, []],
    "flag": [1, 0, "true", None],
    "text": [3, None, ["a"], True],
    "sizes": ["12", [1, "2"], [0.5], 3, {"a": 1}, [[1]]],
    "pair": [[1], [1, 2, 3], [0.5, 1], "ab"],
    "shapes": [[], {"a": 1}, {"a": ["1"]}, "a"],
    "maybe": ["3"],
    "either": [0.5, None],
    "choice": ["sigmoid", 3],
    "most": [11],
    "long": ["y"],
    "layer": ["Linear", {}, 3],
    "function": ["print", 3],
    "evaluated": ["3"],
}


@pytest.mark.parametrize("args", [{key: value} for key, values in OTHER_TYPES.items() for value in values], ids=str)
def test_arguments_of_other_types_are_refused(args: dict[str, Any]) -> None:
    (key,) = args
    error = refusal(typed, args)
    assert error.reason == "bad_argument"
    assert str(error).startswith(f"my:part: {key} = ")


PATHS = [
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "~",
    "../a",
    "a\\b",
    "C:\\a",
    "\\\\host\\share",
    "https://example.com/x",
    "file:///x",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("function", [anything, typed])
def test_a_text_that_looks_like_a_path_is_refused_where_no_path_is_declared(
    function: Callable[..., Any], path: str, tmp_path: Path
) -> None:
    for value in (path, [path], {"a": path}, {path: 1}, [["a", path]]):
        error = refusal(function, {"free": value}, root=tmp_path)
        assert error.reason == "bad_path"
        assert "declares such a parameter as a Path" in str(error)


def reads(base: Path, plain: PurePath | None = None, maybe: Path | None = None, either: str | Path = "") -> None:
    """A function that reads files."""


def notes(base: Annotated[Path, "a file"], evaluated: "Path | None" = None) -> None:
    """Another one."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of the data: with a file, a folder, and links that stay or lead out."""
    root = tmp_path / "data"
    (root / "folder").mkdir(parents=True)
    (root / "base.pt").touch()
    (root / "folder" / "deep.pt").touch()
    (tmp_path / "secret").touch()
    (tmp_path / "data-beside").mkdir()
    for name, target in {
        "inside": "base.pt",
        "folder/up": "../base.pt",
        "out": "../secret",
        "out-folder": "..",
        "absolute": "/etc/passwd",
        "beside": "../data-beside",
        "dangling": "../nothing",
        "circle": "circle",
        "chain": "folder/next",
        "folder/next": "../out",
    }.items():
        (root / name).symlink_to(target)
    return root


@pytest.mark.parametrize(
    ("text", "below"),
    [
        *(
            ("base.pt", "base.pt"),
            ("folder/deep.pt", "folder/deep.pt"),
            ("./base.pt", "base.pt"),
            ("folder//deep.pt", "folder/deep.pt"),
        ),
        *(
            ("new.pt", "new.pt"),
            ("no/such/file", "no/such/file"),
            ("inside", "base.pt"),
            ("folder/up", "base.pt"),
            ("", ""),
        ),
        *(("a file", "a file"), ("größe", "größe"), ("...", "..."), ("a~", "a~")),
    ],
)
@pytest.mark.parametrize(
    ("function", "key"),
    [(reads, "base"), (reads, "plain"), (reads, "maybe"), (reads, "either"), (notes, "base"), (notes, "evaluated")],
)
def test_a_path_is_taken_below_the_folder_of_the_data(
    root: Path, function: Callable[..., Any], key: str, text: str, below: str
) -> None:
    checked = check(function, {"base": "base.pt", key: text}, root=root)
    assert checked[key] == root / below
    assert isinstance(checked[key], Path)


OUTSIDE = [
    "/etc/passwd",
    "..",
    "../secret",
    "folder/../../secret",
    "folder/../base.pt",
    "~",
    "~/x",
    "~root/x",
    "//host/x",
]
OUTSIDE += ["a\\b", "..\\secret", "C:\\x", "C:x", "https://example.com/x", "file:///etc/passwd", "file:x"]
LINKS = ["out", "out-folder", "out-folder/secret", "absolute", "beside", "dangling", "circle", "circle/x", "chain"]


@pytest.mark.parametrize("text", OUTSIDE + LINKS)
@pytest.mark.parametrize(("function", "key"), [(reads, "base"), (reads, "either"), (notes, "evaluated")])
def test_a_path_that_leads_elsewhere_is_refused(root: Path, function: Callable[..., Any], key: str, text: str) -> None:
    error = refusal(function, {"base": "base.pt", key: text}, root=root)
    assert error.reason == "bad_path"


@pytest.mark.parametrize("value", [3, 0.5, True, ["base.pt"], {"base": "base.pt"}, []], ids=str)
def test_a_path_is_a_text(root: Path, value: object) -> None:
    error = refusal(reads, {"base": value}, root=root)
    assert (error.reason, "is a path, and not a" in str(error)) == ("bad_path", True)


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "x" * (MAX_TEXT + 1)], ids=["zero", "line", "long"])
def test_a_path_has_the_bounds_of_a_text(root: Path, text: str) -> None:
    assert refusal(reads, {"base": text}, root=root).reason == "bad_argument"


def test_without_a_folder_of_the_data_there_are_no_paths(tmp_path: Path) -> None:
    error = refusal(reads, {"base": "base.pt"}, root=None)
    assert (error.reason, "below data_root, which is not set here" in str(error)) == ("bad_path", True)
    assert refusal(reads, {"base": "base.pt"}, root=tmp_path / "nowhere").reason == "bad_path"
    assert check(reads, {"base": None, "maybe": None}) == {"base": None, "maybe": None}


def test_the_folder_of_the_data_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert check(reads, {"base": "folder/up"}, root=tmp_path / "link") == {"base": root / "base.pt"}
    assert refusal(reads, {"base": "out"}, root=tmp_path / "link").reason == "bad_path"


def several(files: list[Path] | None = None, named: dict[str, Path] | None = None) -> None:
    """A function that takes paths within other values."""


@pytest.mark.parametrize("args", [{"files": ["base.pt"]}, {"named": {"a": "base.pt"}}], ids=str)
def test_a_path_within_a_list_or_a_table_is_refused_and_not_taken_from_elsewhere(
    root: Path, args: dict[str, Any]
) -> None:
    assert refusal(several, args, root=root).reason == "bad_path"


def test_a_parameter_whose_annotation_cannot_be_evaluated_cannot_be_given(root: Path) -> None:
    def net(base: "Path", plan: "ThereIsNoSuchType" = None) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert refusal(net, {"base": "base.pt"}, root=root).reason == "bad_argument"
