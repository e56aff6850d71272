"""What jobs may name: collected once from what is trusted, and only looked up afterwards."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.offers import KINDS, marks_of, named, offers
from fedring.train.errors import SeamError
from fedring.train.names.offered import Offered, collect

Write = Callable[..., None]

HEAD = "from fedring.offers import offers\n"
SHOP = {
    "shop/__init__": HEAD
    + """
from subprocess import run
from torch import nn
from torch.nn import Linear
from shop.shelf import prices

@offers("model")
def net(hidden: int = 3): return nn.Linear(hidden, 2)

@offers("loss", "evaluator")
def both(): ...

@offers("data")
class Stock: ...

def plain(): ...

@offers("model")
def _hidden(): ...

class Scored(nn.Module): ...

number = 3
""",
    "shop/shelf": HEAD + "from shop import __name__ as parent\n\n@offers('data')\ndef prices(root, download): ...\n",
    "shop/attic": HEAD + "from pathlib import Path\nPath(__file__).with_name('was-here').touch()\n"
    "\n@offers('data')\ndef dust(root, download): ...\n",
}
SHOP_OFFERS = {
    "data": ["shop.shelf:prices", "shop:Stock", "shop:prices"],
    "evaluator": ["shop:both"],
    "loss": ["shop:both"],
    "model": ["shop:Scored", "shop:net"],
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes modules which can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def shop(write: Write) -> Offered:
    """Return what a user's package offers."""
    write(**SHOP)
    return collect(["fedring", "shop"])


def refusal(offered: Offered, kind: Any, name: str, args: dict[str, Any] | None = None) -> SeamError:
    with pytest.raises(SeamError) as caught:
        offered.get(kind, name, args)
    return caught.value


def not_collected(*trusted: str) -> SeamError:
    with pytest.raises(SeamError) as caught:
        collect(trusted)
    return caught.value


def test_nothing_is_offered_unless_something_is_trusted() -> None:
    assert collect([]).names() == {}
    assert refusal(collect([]), "model", "fedring.train.models:mnist_cnn").reason == "not_offered"


def test_fedring_offers_its_own_parts_and_nothing_else() -> None:
    models = ("arrays", "cifar_cnn", "digits_mlp", "mnist_cnn", "mnist_tanh_cnn", "vector")
    assert collect(["fedring"]).names() == {
        "data": [f"fedring.data:{name}" for name in ("cifar10", "digits", "fashion_mnist", "mnist")],
        "loss": ["fedring.train.losses:cross_entropy"],
        "model": [f"fedring.train.models:{name}" for name in models],
        "optimizer": ["fedring.train.optimizers:adam", "fedring.train.optimizers:sgd"],
    }


def test_a_package_offers_what_is_marked_in_it_and_its_classes_of_torch_modules(write: Write) -> None:
    write(**SHOP)
    assert collect(["shop"]).names() == SHOP_OFFERS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_marked_and_is_only_of_that_kind(write: Write, kind: str) -> None:
    write(kinds=f"{HEAD}\n@offers({kind!r})\ndef part(): ...\n")
    offered = collect(["kinds"])
    assert offered.names() == {kind: ["kinds:part"]}
    for other in set(KINDS) - {kind}:
        assert f"is offered as {kind}, and not as {other}" in str(refusal(offered, other, "kinds:part"))


@pytest.mark.parametrize("name", ["shop:run", "shop:Linear", "shop:plain", "shop:number", "shop:nn", "shop:offers"])
def test_what_a_module_only_imports_or_does_not_mark_is_not_offered(shop: Offered, name: str) -> None:
    for kind in KINDS:
        assert refusal(shop, kind, name).reason == "not_offered"


@pytest.mark.parametrize("name", ["shop:_hidden", "shop:__name__", "shop:__builtins__", "shop:__loader__"])
def test_a_name_that_begins_with_an_underscore_is_not_offered_even_if_it_is_marked(shop: Offered, name: str) -> None:
    for kind in KINDS:
        assert refusal(shop, kind, name).reason == "not_offered"


def test_a_module_offers_what_stands_in_its_all_even_if_it_has_imported_it(write: Write) -> None:
    write(
        makers=HEAD + "@offers('model')\ndef net(): ...\n\n@offers('model')\ndef other(): ...\n",
        front="from subprocess import run\nfrom torch.nn import Linear\nfrom makers import net, other\n"
        "__all__ = ['net', 'run', 'Linear', 'nowhere']\n",
    )
    assert collect(["front"]).names() == {"model": ["front:Linear", "front:net"]}


def test_only_the_modules_that_a_package_imports_itself_are_offered_and_no_other_is_imported(
    write: Write, tmp_path: Path
) -> None:
    write(**SHOP)
    before = set(sys.modules)
    offered = collect(["shop"])
    assert set(sys.modules) - before == {"shop", "shop.shelf"}
    for kind in KINDS:
        assert refusal(offered, kind, "shop.attic:dust").reason == "not_offered"
    assert "shop.attic" not in sys.modules
    assert not (tmp_path / "shop" / "was-here").exists()
    assert isfunction(collect(["shop", "shop.attic"]).get("data", "shop.attic:dust"))


def test_a_module_below_a_trusted_one_can_be_trusted_alone(write: Write) -> None:
    write(**SHOP)
    assert collect(["shop.shelf"]).names() == {"data": ["shop.shelf:prices"]}


def test_a_module_whose_name_only_begins_like_a_trusted_one_is_not_trusted(write: Write) -> None:
    write(**SHOP, shopping=HEAD + "@offers('model')\ndef cart(): ...\n")
    importlib.import_module("shopping")
    assert not any(name.startswith("shopping") for names in collect(["shop"]).names().values() for name in names)


def test_a_subclass_does_not_inherit_the_mark(write: Write) -> None:
    text = "from torch import nn\n\n@offers('rule')\nclass First: ...\n\nclass Second(First): ...\n\n"
    text += "@offers('data')\nclass Odd(nn.Module): ...\n\nclass Even(Odd): ...\n"
    write(family=HEAD + text)
    offered = collect(["family"])
    assert offered.names() == {
        "data": ["family:Odd"],
        "model": ["family:Even"],
        "rule": ["family:First"],
    }
    assert "model" not in offered.marked().names()


def test_a_cached_function_can_be_marked_on_both_sides_of_its_cache(write: Write) -> None:
    write(
        cached=HEAD
        + "from functools import cache, lru_cache\n\n@offers('data')\n@lru_cache(maxsize=1)\ndef outside(): return 1\n"
        + "\n@cache\n@offers('data')\ndef inside(): return 2\n"
    )
    offered = collect(["cached"])
    assert [offered.get("data", f"cached:{name}")() for name in ("outside", "inside")] == [1, 2]


UNFIT = (
    "from functools import partial\nfrom os import getcwd, system\nimport random\n"
    "half = partial(print, 'called')\nmethod = random.Random(1).getrandbits\n"
    "class Called:\n    def __call__(self): print('called')\nobject_ = Called()\nnumber = 3\n"
    "__all__ = ['half', 'method', 'object_', 'number', 'getcwd', 'system']\n"
)


@pytest.mark.parametrize("name", ["half", "method", "object_", "number", "getcwd", "system"])
def test_what_is_no_function_and_no_class_cannot_be_offered(
    write: Write, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(unfit=UNFIT)
    assert refusal(collect(["unfit"]), "model", f"unfit:{name}").reason == "not_offered"
    error = not_collected(f"unfit:{name} as model")
    assert error.reason == "not_callable"
    assert "define a function that calls it" in str(error)
    with pytest.raises(TypeError, match="cannot be offered: define a function that calls it"):
        offers("model")(getattr(sys.modules["unfit"], name))
    assert capsys.readouterr().out == ""


def test_an_object_that_only_pretends_to_be_a_class_is_not_offered_and_not_asked(write: Write) -> None:
    pretender = "class Pretends:\n    @property\n    def __class__(self): {}\npretends = Pretends()\n"
    write(honest=pretender.format("return type"), touchy=pretender.format("raise OSError('I was asked')"))
    assert collect(["honest"]).names() == collect(["touchy"]).names() == {}


def test_classes_of_torch_modules_are_models_until_a_site_is_strict(shop: Offered) -> None:
    scored: Any = shop.get("model", "shop:Scored")
    assert issubclass(scored, nn.Module)
    strict = shop.marked()
    assert refusal(strict, "model", "shop:Scored").reason == "not_offered"
    assert refusal(strict, "remote", "shop:Scored").reason == "not_offered"
    assert strict.get("model", "shop:net") is shop.get("model", "shop:net")
    assert strict.trusted == shop.trusted


@pytest.mark.parametrize("order", [1, -1])
def test_a_class_that_the_operator_names_stays_where_a_site_is_strict(write: Write, order: int) -> None:
    write(**SHOP)
    strict = collect(["shop", "shop:Scored as model"][::order]).marked()
    assert isclass(strict.get("model", "shop:Scored"))
    assert refusal(strict, "remote", "shop:Scored").reason == "not_offered"


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("shop:plain as trainer", {"trainer": ["shop:plain"]}),
        (" shop:plain  as  trainer ", {"trainer": ["shop:plain"]}),
        ("shop:net as loss", {"loss": ["shop:net"]}),
        ("shop:both", {"evaluator": ["shop:both"], "loss": ["shop:both"]}),
        ("shop:plain", {"model": ["shop:plain"]}),
        ("shop:_hidden as model", {"model": ["shop:_hidden"]}),
        ("shop:run as data", {"data": ["shop:run"]}),
        ("shop:Linear", {"model": ["shop:Linear"]}),
        ("shop.attic:dust as data", {"data": ["shop.attic:dust"]}),
    ],
)
def test_an_operator_can_name_single_functions_and_offers_only_those(
    write: Write, entry: str, names: dict[str, list[str]]
) -> None:
    write(**SHOP)
    assert collect([entry]).names() == collect([entry]).marked().names() == names


def test_named_writes_the_entries_of_what_a_configuration_names() -> None:
    assert named(model="shop:net", data="", loss="shop:both") == ["shop:net as model", "shop:both as loss"]


@pytest.mark.parametrize(
    "entry",
    [
        *("", " ", "shop as model", "shop:net as", "shop:net as nothing", "shop:net as model as loss", " as model"),
        *(
            "shop:",
            ":net",
            "shop:Stock.sell",
            "shop:a:b",
            "shop net",
            "shop;os",
            "../shop",
            "shop/attic",
            "/shop",
            ".shop",
        ),
        *("shop..attic", "__main__", "__main__:net as model", "shop:__init__ as model", "shop.__init__", "__future__"),
    ],
)
def test_an_entry_that_names_no_module_is_refused_before_anything_is_imported(write: Write, entry: str) -> None:
    write(**SHOP)
    before = set(sys.modules)
    error = not_collected(entry)
    assert error.reason == "bad_trusted"
    assert repr(entry) in str(error)
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "There is no module broken, which trusted = 'broken' needs: install it"),
        ("import a_module_that_is_not_installed", "There is no module a_module_that_is_not_installed, which trusted"),
        ("raise OSError('no disk')", "broken, which is trusted, cannot be imported: OSError: no disk."),
        (
            "raise SystemExit",
            "broken, which is trusted, cannot be imported: CodeEnded: the job's code called sys.exit()",
        ),
        ("def net(:", "broken, which is trusted, cannot be imported: SyntaxError: "),
    ],
)
def test_a_trusted_module_that_cannot_be_imported_is_named(write: Write, text: str | None, sentence: str) -> None:
    write(**({"broken": text} if text else {}))
    error = not_collected("broken")
    assert error.reason == "no_module"
    assert sentence in str(error)


@pytest.mark.parametrize(
    ("entry", "advice"),
    [
        ("shop:ney", "did you mean net?"),
        ("shop:_hiden", "correct the name."),
        ("shop:zebra as data", "correct the name."),
        ("torchvision:resnet81", "did you mean torchvision:resnet18?"),
        ("torchvision:transformer", "correct the name."),
        ("torchvision:models", "correct the name."),
    ],
)
def test_an_entry_whose_attribute_does_not_exist_is_refused(write: Write, entry: str, advice: str) -> None:
    write(**SHOP)
    error = not_collected(entry)
    assert error.reason == "no_attribute"
    assert str(error).endswith(advice)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            ":",
            "shop",
            "shop:",
            ":net",
            "shop:a.b",
            "shop:Stock.sell",
            "shop net:x",
            "..x:y",
            "a:b:c",
            "shop:net ",
            " shop:net",
        ),
        *(
            "shop:net as model",
            "shop:net()",
            "shop:net;x",
            "shop/attic:dust",
            "shop\\attic:dust",
            "shop:net\n",
            "shop:\0",
        ),
        *("shop.:net", ".shop:net", "shop..shelf:prices", "1shop:net", "shop:1net", "shop:n-t", "a" * 100_000),
    ],
)
def test_a_name_that_is_not_module_and_attribute_is_refused(shop: Offered, name: str) -> None:
    error = refusal(shop, "model", name)
    assert error.reason == "bad_name"
    assert str(error).isprintable()
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("kind", "name", "whole"),
    [
        ("model", "digits_mlp", "fedring.train.models:digits_mlp"),
        ("data", "mnist", "fedring.data:mnist"),
        ("loss", "cross_entropy", "fedring.train.losses:cross_entropy"),
        ("model", "net", "shop:net"),
    ],
)
def test_a_name_without_its_module_is_completed(shop: Offered, kind: str, name: str, whole: str) -> None:
    error = refusal(shop, kind, name)
    assert str(error) == f"The name {name!r} is not of the form module:attribute: did you mean {whole}?"


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("model", "fedring.train.models:mnist_cn", "did you mean fedring.train.models:mnist_cnn?"),
        ("model", "shop:nett", "did you mean shop:net?"),
        ("loss", "shop:net", '@offers("loss") if it is that, too.'),
        (
            "loss",
            "shop:plain",
            'though shop is trusted: mark it with @offers("loss") there, and start this daemon again.',
        ),
        ("data", "shop.attic:dust", "though shop.attic is trusted: mark it with"),
        ("data", "fedring.dta:digits", "is not part of fedring, which offers fedring.data:cifar10, "),
        ("trainer", "fedring.client.main:command", "is not part of fedring, which offers nothing as trainer."),
        ("model", "nowhere:net", """add "nowhere:net as model" to trusted here."""),
    ],
)
def test_a_refusal_says_what_to_do(shop: Offered, kind: str, name: str, sentence: str) -> None:
    error = refusal(shop, kind, name)
    assert error.reason == "not_offered"
    assert sentence in str(error)


def test_the_advice_of_a_refusal_can_be_pasted_and_does_not_say_what_else_is_trusted(shop: Offered) -> None:
    text = str(refusal(shop, "data", "json.tool:main"))
    assert isfunction(collect([text.split('"')[1]]).get("data", "json.tool:main"))
    assert "shop" not in text


LOOKALIKES = [
    "ѕhop:net",
    "shop:nеt",
    "ｓhop:net",
    "shop:ｎet",
    "shop:neｔ",
    "ſhop:net",
    "shop:ⁿet",
    "fedring.dаta:digits",
]


@pytest.mark.parametrize("name", LOOKALIKES)
def test_letters_that_look_like_others_are_shown_and_name_nothing(shop: Offered, name: str) -> None:
    assert not name.isascii()
    for kind in KINDS:
        error = refusal(shop, kind, name)
        assert error.reason == "not_offered"
        assert str(error).isascii()
        assert "\\u" in str(error) or "\\x" in str(error)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("shop:net", True),
        ("shop.attic:dust", True),
        ("shop", True),
        ("shopping:cart", False),
        ("json.tool:main", False),
        ("json.tool:other", False),
        ("fedring.data:digits", False),
        ("", False),
    ],
)
def test_all_of_a_module_is_known_only_if_it_is_trusted_as_a_whole(write: Write, name: str, known: bool) -> None:
    write(**SHOP)
    assert collect(["shop", "json.tool:main as data"]).knows_module(name) is known


def test_trusted_modules_that_offer_nothing_are_listed(write: Write) -> None:
    write(**SHOP, empty="def net(): ...\n")
    offered = collect(["shop", "empty", "fedring", "empty:net as model", "torchvision"])
    assert offered.without_offers() == []
    assert collect(["shop", "empty", "json"]).without_offers() == ["empty", "json"]
    assert collect(["shop.shelf", "shop"]).marked().without_offers() == []
    assert collect([]).without_offers() == []


def test_a_line_for_each_kind_lists_its_names(shop: Offered) -> None:
    lines = shop.lines()
    assert len(lines) == len(shop.names())
    assert "jobs may name as evaluator: shop:both" in lines


def test_an_offer_is_looked_up_and_not_called(write: Write) -> None:
    write(bomb=HEAD + "@offers('model')\ndef net(size: int = 1): raise SystemExit('called')\n")
    offered = collect(["bomb"])
    assert isfunction(offered.get("model", "bomb:net"))
    made = offered.get("model", "bomb:net", {"size": 3})
    assert isinstance(made, partial)
    assert made.keywords == {"size": 3}


def test_a_trusted_entry_that_stands_twice_counts_once(shop: Offered) -> None:
    again = collect(["fedring", "shop", "fedring", "shop"])
    assert again.trusted == shop.trusted
    assert again.names() == shop.names()


def test_torchvision_offers_the_models_of_its_registry_and_nothing_else() -> None:
    names = collect(["torchvision"]).names()
    assert names.keys() == {"model"}
    assert {"torchvision:resnet18", "torchvision:vit_b_16"} < set(names["model"])
    assert not any("." in name for name in names["model"])
    builders = [collect(["torchvision"]).get("model", name) for name in names["model"]]
    assert {builder.__module__.partition(".models.")[0] for builder in builders} == {"torchvision"}
    assert collect(["torchvision:resnet18"]).names() == {"model": ["torchvision:resnet18"]}


def test_a_torchvision_model_is_built_with_the_arguments_of_the_job() -> None:
    model = collect(["torchvision"]).get("model", "torchvision:resnet18", {"num_classes": 10})()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_181_642


@pytest.mark.parametrize("name", ["resnet_18", "get_model", "list_models", "ResNet", "datasets", "__version__"])
def test_what_is_not_in_torchvisions_registry_is_not_offered(name: str) -> None:
    assert refusal(collect(["torchvision"]), "model", f"torchvision:{name}").reason == "not_offered"


@pytest.mark.parametrize("trusted", ["torchvision", "torchvision:resnet18", "torchvision.models:resnet18 as model"])
@pytest.mark.parametrize("args", [{"weights": "DEFAULT"}, {"pretrained": True}, {"weights_backbone": "DEFAULT"}])
def test_a_job_cannot_make_a_daemon_download_weights(trusted: str, args: dict[str, Any]) -> None:
    offered = collect([trusted])
    (name,) = (each for each in offered.names()["model"] if each.endswith(":resnet18"))
    error = refusal(offered, "model", name, args)
    assert error.reason == "no_download"
    assert "start this daemon with download=true" in str(error)


@pytest.mark.parametrize(
    ("weights", "good"),
    [
        *(("DEFAULT", True), ("IMAGENET1K_V1", True), ("ResNet18_Weights.DEFAULT", True)),
        *(
            ("https://example.com/x.pth", False),
            ("../x.pth", False),
            ("a b", False),
            ("", False),
            (3, False),
            (["x"], False),
        ),
    ],
)
def test_weights_are_names_even_where_downloads_are_allowed(weights: object, good: bool) -> None:
    offered = collect(["torchvision"], download=True)
    if good:
        made: Any = offered.get("model", "torchvision:resnet18", {"weights": weights, "num_classes": 3})
        assert made.keywords == {"weights": weights, "num_classes": 3}
    else:
        error = refusal(offered, "model", "torchvision:resnet18", {"weights": weights})
        assert error.reason == "bad_argument"


def test_a_mark_names_at_least_one_kind_that_exists() -> None:
    with pytest.raises(ValueError, match="choose from model, data, loss"):
        offers()
    with pytest.raises(ValueError, match="'modell'"):
        offers("model", "modell")  # type: ignore[arg-type]  # it is what the test is about


def test_a_mark_leaves_a_function_and_a_class_as_they_are() -> None:
    def net() -> int:
        return 3

    class Rule: ...

    assert offers("model", "remote")(net) is net
    assert offers("rule")(Rule) is Rule
    assert (net(), marks_of(net), marks_of(Rule)) == (3, ("model", "remote"), ("rule",))
    assert marks_of(torch.nn.Linear) == marks_of(3) == marks_of(partial(net)) == ()
