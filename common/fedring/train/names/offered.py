"""The names that jobs may use, collected when a daemon starts.

They are collected by kind, from the modules and names that its operator trusts. `trusted` is a list of

- `fedring`: the models, data sets, losses and optimizers that come with it;
- `torchvision`: the models for images in torchvision's own registry, as `torchvision:resnet18`;
- a module: everything that is marked with `fedring.offers.offers` in it, or in the modules below it that it imports
  itself, and the classes derived from torch.nn.Module there, as models. A name that a module only imports is not
  offered through it, unless it stands in its `__all__`;
- a function or class, `module:attribute as kind`, which needs no mark. Without `as`, its mark decides; without a mark,
  it is a model.

Afterwards a name is only looked up: that imports nothing and calls nothing.
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from torch import nn

from fedring import vision
from fedring.daemon.wording import listed
from fedring.job_code import job_code
from fedring.offers import KINDS, Kind, can_be_offered, marks_of
from fedring.train.errors import SeamError
from fedring.train.names.arguments import check_arguments
from fedring.train.names.sources import Sources

_OWN_MODULES = ("fedring.train.models", "fedring.data", "fedring.train.losses", "fedring.train.optimizers")
_GIVEN = {"data": 2, "loss": 2, "optimizer": 3, "trainer": 3, "evaluator": 2, "cut": 1}  # arguments by position
_WEIGHTS = frozenset({"weights", "weights_backbone", "pretrained"})  # with these, torchvision downloads
_NEAR = 0.7  # how similar a name must be to be suggested, from 0 to 1
_NOT_EDITED = ("fedring", "torch", "torchvision")  # nobody edits these in the place where they are installed
_MOST_EDITED = 3  # names in a sentence
_MAX_SHOWN = 200  # characters of a name from outside


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A function or class that jobs may name.

    Attributes:
        kind: Its kind.
        name: Its name, module:attribute.
        function: The function or class.
        marked: Whether it carries the mark, or the operator has named it, and not only its module.
        downloads: The arguments with which it downloads files.
    """

    kind: Kind
    name: str
    function: Callable[..., Any]
    marked: bool = True
    downloads: frozenset[str] = frozenset()


class Offered:
    """The table of all that jobs may name here.

    Args:
        offers: The offers.
        trusted: The entries that it was collected from, for errors.
        root: The folder below which paths in arguments lie; None = no path can be given.
        download: Whether arguments may make a callable download files.
        sources: The files of the modules that the offers come from.
    """

    def __init__(
        self,
        offers: Iterable[Offer] = (),
        trusted: Iterable[str] = (),
        *,
        root: Path | None = None,
        download: bool = False,
        sources: Sources | None = None,
    ) -> None:
        self._offers = {(offer.kind, offer.name): offer for offer in offers}
        self.trusted = tuple(trusted)
        self._root, self._download = root, download
        self._sources = sources or Sources()

    def get(self, kind: Kind, name: str, args: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Look up a name from a job.

        Args:
            kind: The kind that the job names it as.
            name: The name, module:attribute.
            args: Keyword arguments from the job, as parsed from JSON; None = the job gives it none.

        Returns:
            The function or class; with its keyword arguments, if there are any.

        Raises:
            SeamError: With the reason bad_name, not_offered, bad_argument, bad_path or no_download.
        """
        offer = self._offers.get((kind, name))
        if offer is None:
            raise self._refusal(kind, name)
        wanted = {key: value for key, value in (args or {}).items() if value is not None and value is not False}
        if not self._download and (asked := sorted(wanted.keys() & offer.downloads)):
            advice = "start this daemon with download=true, or leave it out."
            raise SeamError("no_download", f"{name} would download files with {asked[0]}: {advice}")
        if args is None:
            return offer.function
        # The arguments that download were checked above, and only names of weights are passed on.
        typed = {key: value for key, value in args.items() if key not in offer.downloads}
        checked = check_arguments(name, offer.function, typed, given=_GIVEN.get(kind, 0), root=self._root)
        chosen = {key: _weights(name, args[key]) for key in args if key in offer.downloads}
        return partial(offer.function, **checked, **chosen)

    def names(self) -> dict[str, list[str]]:
        """Return all names by kind, both sorted."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for kind, name in sorted(self._offers):
            names[kind].append(name)
        return dict(names)

    def lines(self) -> list[str]:
        """Return a line for each kind, with all its names."""
        return [f"jobs may name as {kind}: {', '.join(names)}" for kind, names in self.names().items()]

    def marked(self) -> "Offered":
        """Return the same table without unmarked classes.

        Nobody has marked or named these. Sites with a policy use this table.
        """
        offers = [offer for offer in self._offers.values() if offer.marked]
        return Offered(offers, self.trusted, root=self._root, download=self._download, sources=self._sources)

    def edited(self, program: str) -> str:
        """Return a sentence about modules that were edited since they were imported.

        Args:
            program: The program that has imported them, and what to do with it.

        Returns:
            The sentence; empty if nothing was edited.
        """
        names = self._sources.edited()
        if not names:
            return ""
        return f"{listed(names, _MOST_EDITED)} {'was' if len(names) == 1 else 'were'} edited after {program}"

    def without_offers(self) -> list[str]:
        """Return the trusted modules that offer nothing."""
        modules = {name.partition(":")[0] for _, name in self._offers}
        whole = [root for root in self.trusted if ":" not in root]
        return [root for root in whole if not any(_is_below(module, root) for module in modules)]

    def knows_module(self, name: str) -> bool:
        """Return whether the module of a name is trusted as a whole.

        Then everything that it offers is known here.
        """
        module = name.partition(":")[0]
        return any(":" not in root and _is_below(module, root) for root in self.trusted)

    def _refusal(self, kind: Kind, name: str) -> SeamError:
        quoted = ascii(name[:_MAX_SHOWN])[:_MAX_SHOWN]  # shows letters that look like others, by ten characters at most
        shown = name[:_MAX_SHOWN] if name.isascii() else quoted
        module, colon, attribute = name.partition(":")
        known = [other for of, other in self._offers if of == kind]
        if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            by_attribute = {other.partition(":")[2]: other for other in known}
            near = get_close_matches(name[:_MAX_SHOWN], by_attribute, n=1, cutoff=_NEAR)
            advice = f": did you mean {by_attribute[near[0]]}?" if near else "."
            return SeamError("bad_name", f"The name {quoted} is not of the form module:attribute{advice}")
        if others := [of for of in KINDS if (of, name) in self._offers]:
            detail = f"{shown} is offered as {' and '.join(others)}, and not as {kind}"
            return SeamError("not_offered", f'{detail}: mark it with @offers("{kind}") if it is that, too.')
        beside = [other for other in known if other.partition(":")[0] == module]
        if near := get_close_matches(name[:_MAX_SHOWN], beside, n=1, cutoff=_NEAR):
            return SeamError("not_offered", f"{shown} is not offered here as {kind}: did you mean {near[0]}?")
        if self.knows_module(name) and _is_below(module, "fedring"):
            own = ", ".join(other for other in known if _is_below(other.partition(":")[0], "fedring")) or "nothing"
            return SeamError("not_offered", f"{shown} is not part of fedring, which offers {own} as {kind}.")
        if self.knows_module(name):
            advice = f'mark it with @offers("{kind}") there, and start this daemon again.'
            detail = f"{shown} is not offered here as {kind}, though {module} is trusted"
            return SeamError("not_offered", f"{detail}: {advice}")
        advice = f'correct the name, or, if its owner wants jobs to use it, add "{shown} as {kind}" to trusted here.'
        return SeamError("not_offered", f"{shown} is not offered here as {kind}: {advice}")


def collect(
    trusted: Iterable[str],
    *,
    root: Path | None = None,
    download: bool = False,
    objects: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Offered:
    """Import everything that an operator trusts, and collect its offers.

    This may take seconds.

    Args:
        trusted: Modules, and names of functions and classes, as the module's docstring says.
        root: The folder below which paths in arguments lie; None = no path can be given.
        download: Whether arguments may make a callable download files.
        objects: Functions and classes of the calling program by the names that stand for them in `trusted`, which are
            not imported.

    Raises:
        SeamError: With the reason bad_trusted, if an entry cannot be read, no_module, if a module cannot be imported,
            no_attribute, if it has no such attribute, or not_callable, if that is no function or class.
    """
    entries = list(dict.fromkeys(trusted))
    offers = [offer for entry in entries for offer in _offers_of(entry, objects)]
    # An operator's own word counts more than a module's mark of the same name.
    names = (entry.partition(" as ")[0].strip() for entry in entries)
    own = [name.partition(":")[0] for name in names if name not in objects]
    sources = Sources(name for name in own if name.partition(".")[0] not in _NOT_EDITED)
    offers.sort(key=lambda offer: offer.marked)
    return Offered(offers, entries, root=root, download=download, sources=sources)


def _offers_of(entry: str, objects: Mapping[str, Callable[..., Any]]) -> Iterator[Offer]:
    name, _, kind = (part.strip() for part in entry.partition(" as "))
    if name in objects:
        yield from (Offer(of, name, objects[name]) for of in KINDS if of == kind)
        return
    module, colon, attribute = name.partition(":")
    if kind and (not colon or kind not in KINDS):
        advice = f"write module:attribute as one of {', '.join(KINDS)}"
        raise SeamError("bad_trusted", f"{entry!r} cannot be trusted: {advice}.")
    parts = [*module.split("."), *([attribute] if colon else [])]
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise SeamError("bad_trusted", f"{entry!r} cannot be trusted: it does not begin with the name of a module.")
    if module == "torchvision" and kind in ("", "model"):
        yield from _of_torchvision(attribute)
    elif colon:
        yield from _named(name, _import(module, entry), attribute, kind)
    elif module == "fedring":
        for own in _OWN_MODULES:
            yield from _in_module(_import(own, entry))
    else:
        _import(module, entry)
        # The modules of its package that it has itself imported are there by now. Nothing else is imported.
        for below in sorted(each for each in sys.modules if _is_below(each, module)):
            private = "._" in below.removeprefix(module)
            if not private and isinstance(found := sys.modules[below], ModuleType):
                yield from _in_module(found, below)


def _named(name: str, module: ModuleType, attribute: str, kind: str) -> Iterator[Offer]:
    """Yield the offers of a name that an operator trusts."""
    try:
        value = getattr(module, attribute)
    except AttributeError as error:
        near = get_close_matches(attribute, [each for each in vars(module) if not each.startswith("_")], n=1)
        advice = f"did you mean {near[0]}?" if near else "correct the name."
        raise SeamError("no_attribute", f"There is no {attribute} in {name.partition(':')[0]}: {advice}") from error
    if not can_be_offered(value):
        detail = f"{name} is a {type(value).__name__}: name a function or a class, or define a function that calls it."
        raise SeamError("not_callable", detail)
    kinds: tuple[Kind, ...] = tuple(of for of in KINDS if of == kind) or marks_of(value) or ("model",)
    for each in kinds:
        yield Offer(each, name, value, downloads=_WEIGHTS if _is_below(module.__name__, "torchvision") else frozenset())


def _in_module(module: ModuleType, name: str = "") -> Iterator[Offer]:
    """Yield the offers of a module.

    They are the marked functions and classes in it, and its classes that are torch modules.
    """
    name = name or module.__name__
    public = vars(module).get("__all__")
    public = set(public) if isinstance(public, list | tuple) else set()
    for attribute, value in list(vars(module).items()):
        if attribute.startswith("_") or not can_be_offered(value):
            continue
        if not (_is_below(getattr(value, "__module__", None) or "", name) or attribute in public):
            continue  # The module has only imported it, for itself.
        marks = marks_of(value)
        for kind in marks:
            yield Offer(kind, f"{name}:{attribute}", value)
        if not marks and isinstance(value, type) and issubclass(value, nn.Module):
            yield Offer("model", f"{name}:{attribute}", value, marked=False)


def _of_torchvision(attribute: str) -> Iterator[Offer]:
    """Yield torchvision's models for images, or one of them.

    Other models download weights by default.
    """
    try:
        vision.load()
    except ImportError as error:
        detail = "There is no module torchvision, which is trusted here: install it, or leave it out of trusted."
        raise SeamError("no_module", detail) from error
    from torchvision import models

    known = models.list_models(module=models)
    if attribute and attribute not in known:
        near = get_close_matches(attribute, known, n=1)
        advice = f"did you mean torchvision:{near[0]}?" if near else "correct the name."
        raise SeamError("no_attribute", f"torchvision has no model {attribute}: {advice}")
    for each in [attribute] if attribute else known:
        yield Offer("model", f"torchvision:{each}", models.get_model_builder(each), downloads=_WEIGHTS)


def _weights(name: str, value: object) -> object:
    """Return the name of weights for torchvision's own lookup.

    Raises:
        SeamError: With the reason bad_argument, if it is no such name.
    """
    if value is None or value is False or (isinstance(value, str) and value.replace(".", "_").isidentifier()):
        return value
    raise SeamError("bad_argument", f"{name}: the weights {str(value)[:80]!r} are no name, such as DEFAULT.")


def _import(module: str, entry: str) -> ModuleType:
    try:
        if _is_below(module, "torchvision"):
            vision.load()
        with job_code():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        detail = (
            f"There is no module {error.name}, which trusted = {entry!r} needs: install it where this program runs, "
            "add its folder to PYTHONPATH, or correct the name."
        )
        raise SeamError("no_module", detail) from error
    except Exception as error:  # the user's code may raise anything
        described = f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__
        raise SeamError("no_module", f"{module}, which is trusted, cannot be imported: {described}.") from error


def _is_below(module: str, root: str) -> bool:
    return module == root or module.startswith(root + ".")
