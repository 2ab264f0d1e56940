"""Installed plugins and their offers: the typed interface of the hooks in `fd_core.hookspecs`.

Built-ins and installed distributions are registered the same way, by `Plugins.discover`. Discovery imports the plugins'
entry modules, never the classes that they describe. A plugin that breaks a rule is skipped entirely and its problem is
recorded: commands that do not need it work, and naming it raises `PluginError` with the distribution and the cause.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pluggy

from fd_core import hookspecs
from fd_core.errors import PluginError
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP, Entry

if TYPE_CHECKING:
    from fd_core.backends.contract import Availability, Backend
    from fd_core.cluster.scaling import ScalingPolicy
    from fd_core.disagg.connectors.contract import Connector
    from fd_core.kv.stores.contract import KVStore
    from fd_core.launching.contract import Launcher
    from fd_core.models.families.contract import Family
    from fd_core.router.policies import RouterPolicy
    from fd_core.runner.drafting import Drafter
    from fd_core.runner.observing import Observer
    from fd_core.runner.postprocess.contract import Postprocess
    from fd_core.scheduling.contract import Scheduler
    from fd_core.scheduling.policies import SchedulingPolicy
    from fd_core.scheduling.victims import VictimPolicy
    from fd_core.text.parsing.contract import ReasoningParser, ToolParser


OWN_CODE: Final = "the plugin's code raised this: install another version of it, or ask its author"
"""Hint for an error that only the plugin's author can explain."""
_HOOK_PREFIX: Final = "fd_"
_NAME: Final = re.compile(r"[a-z0-9_+]+")
_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class PluginContractError(Exception):
    """Code or data of a plugin broke a rule; the text is the cause, `hint` the remedy."""

    def __init__(self, cause: str, hint: str) -> None:
        super().__init__(cause)
        self.hint = hint


def shielded(action: Callable[[], Any]) -> Any:
    """Run code of a plugin. Any exception becomes a `PluginContractError`, the plugin's problem."""
    try:
        return action()
    except PluginContractError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise PluginContractError(f"{type(error).__name__}: {text}".removesuffix(": "), _hint_for(error)) from error


def _hint_for(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that provides {error.name}; add it to the pyproject.toml of a plugin that needs it"
    if isinstance(error, (ImportError, AttributeError)):
        return "correct the name, or install a version that has it"
    return OWN_CODE


def check_module(module: object) -> None:
    """Reject a plugin that was built for another contract or implements an unknown hook; `PluginContractError`."""
    if not isinstance(module, ModuleType):
        hint = f"in pyproject.toml, [project.entry-points.{ENTRY_POINT_GROUP}], write the module without `:`"
        raise PluginContractError(f"the entry point must be a module, got {described(module)}", hint)
    version = getattr(module, "FD_CONTRACT", None)
    if version is None:
        cause = f"{module.__name__} declares no FD_CONTRACT; this fd_core implements {CONTRACT_VERSION}"
        raise PluginContractError(cause, f"set FD_CONTRACT = {CONTRACT_VERSION} there once it implements that contract")
    if type(version) is not int or version != CONTRACT_VERSION:
        cause = f"it was built for contract {version!r}; this fd_core implements {CONTRACT_VERSION}"
        raise PluginContractError(cause, "install matching versions of the plugin and of fd-core")
    known = {name for name in vars(hookspecs) if name.startswith(_HOOK_PREFIX)}
    for name, value in vars(module).items():
        if not callable(value):
            continue
        marker = getattr(value, "fd_core_impl", None)
        if marker is None and not name.startswith(_HOOK_PREFIX):
            continue
        hook = (marker or {}).get("specname") or name
        if hook not in known:
            hint = (
                "correct the spelling; a newer hook requires a newer fd-core; names of helpers must not start with fd_"
            )
            raise PluginContractError(f"{hook} is not a hook; the hooks are {', '.join(sorted(known))}", hint)
        if marker is None:
            raise PluginContractError(
                f"{name} is not marked with fd_core.hookspecs.hookimpl", "decorate it with @hookimpl"
            )


def checked_entries(hook: str, answer: object) -> list[Entry]:
    """Return the result of a hook if it is a sequence of valid entries. Raises `PluginContractError`."""
    hint = f"return a list of Entry(name, 'package.module:Class', 'one line for lists') from {hook}"
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise PluginContractError(f"{hook}: expected a sequence of Entry, got {described(answer)}", hint)
    entries: list[Entry] = []
    for item in answer:
        if not isinstance(item, Entry):
            raise PluginContractError(f"{hook}: expected an Entry in the sequence, got {described(item)}", hint)
        if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
            raise PluginContractError(
                f"{hook}: name {item.name!r} must consist of lower case letters, digits, _ and +", hint
            )
        if not isinstance(item.target, str) or not _TARGET.fullmatch(item.target):
            raise PluginContractError(
                f"{hook}: target of {item.name}: expected package.module:Class, got {item.target!r}", hint
            )
        if not isinstance(item.summary, str):
            cause = f"{hook}: summary of {item.name}: expected one line, got {described(item.summary)}"
            raise PluginContractError(cause, hint)
        entries.append(item)
    return entries


def described(value: object) -> str:
    """Return type and value in a few words."""
    return f"{type(value).__name__} {value!r:.60}"


KNOWN_PLUGINS: Final[Mapping[str, str]] = {
    "gpu_cuda": "fd-gpu-cuda",
    "xpu": "fd-xpu",
    "metax": "fd-metax",
    "storage_redis": "fd-storage-redis",
    "connector_nixl": "fd-connector-nixl",
    "launcher_ray": "fd-launcher-ray",
}
"""Short names of the project's own plugins and their distributions."""

_PLUGIN_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), "storage_redis"),
    **dict.fromkeys(("cuda", "gpu", "nvidia"), "gpu_cuda"),
    **dict.fromkeys(("kunlun", "kunlunxin"), "xpu"),
    **dict.fromkeys(("maca", "metax_gpu"), "metax"),
    "nixl": "connector_nixl",
    "ray": "launcher_ray",
}
"""Names, up to a `+`, that are offered by plugins with other names."""

_BUILTIN_MODULES: Final = (
    "fd_core.backends.builtin",
    "fd_core.models.families.builtin",
    "fd_core.scheduling.builtin",
    "fd_core.runner.builtin",
    "fd_core.kv.stores.builtin",
    "fd_core.plugins.builtin",
    "fd_core.launching.builtin",
    "fd_core.text.parsing.builtin",
)

_IN_FILE: Final = "in the file"
"""Placeholder for a distribution's name."""
_FILE_MODULE: Final = "fd_core_file_"
_FILE_TARGET: Final = re.compile(r"\.py:[A-Za-z_]\w*$")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of implementation that plugins offer."""

    word: str
    plural: str
    """Suffix of the hook `fd_register_...`."""
    contract: str
    """Module below `fd_core` and class that its targets must derive from."""
    flag: str
    files: bool = False
    """True if a class in a file, `FILE.py:Class`, may replace a name; only for names that only the user sets."""

    @property
    def hook(self) -> str:
        """Name of the hook by which plugins offer it."""
        return f"fd_register_{self.plural}"

    @property
    def base(self) -> str:
        """The class that its targets must derive from, as `package.module:Class`."""
        return f"fd_core.{self.contract}"


BACKEND: Final[Kind[Backend]] = Kind("backend", "backends", "backends.contract:Backend", flag="--backend")
SCHEDULER: Final[Kind[Scheduler]] = Kind(
    "scheduler", "schedulers", "scheduling.contract:Scheduler", flag="--scheduler", files=True
)
SCHEDULING_POLICY: Final[Kind[SchedulingPolicy]] = Kind(
    "scheduling policy",
    "scheduling_policies",
    "scheduling.policies:SchedulingPolicy",
    flag="--scheduling-policy",
    files=True,
)
DRAFTER: Final[Kind[Drafter]] = Kind("drafter", "drafters", "runner.drafting:Drafter", flag="--speculative-config")
POSTPROCESS: Final[Kind[Postprocess]] = Kind(
    "postprocessor", "postprocessors", "runner.postprocess.contract:Postprocess", flag="--postprocess"
)
OBSERVER: Final[Kind[Observer]] = Kind("observer", "observers", "runner.observing:Observer", flag="--observer")
VICTIMS: Final[Kind[VictimPolicy]] = Kind(
    "victim policy", "victim_policies", "scheduling.victims:VictimPolicy", flag="--victim-policy", files=True
)
STORE: Final[Kind[KVStore]] = Kind("KV store", "stores", "kv.stores.contract:KVStore", flag="--kv-store")
CONNECTOR: Final[Kind[Connector]] = Kind(
    "connector", "connectors", "disagg.connectors.contract:Connector", flag="--kv-connector"
)
ROUTER_POLICY: Final[Kind[RouterPolicy]] = Kind(
    "router policy", "router_policies", "router.policies:RouterPolicy", flag="--policy", files=True
)
LAUNCHER: Final[Kind[Launcher]] = Kind(
    "launcher", "launchers", "launching.contract:Launcher", flag="--distributed-executor-backend"
)
MODEL: Final[Kind[Family]] = Kind("model family", "models", "models.families.contract:Family", flag="MODEL")
SCALING_POLICY: Final[Kind[ScalingPolicy]] = Kind(
    "scaling policy", "scaling_policies", "cluster.scaling:ScalingPolicy", flag="policy", files=True
)
TOOL_PARSER: Final[Kind[ToolParser]] = Kind(
    "tool parser", "tool_parsers", "text.parsing.contract:ToolParser", flag="--tool-call-parser"
)
REASONING_PARSER: Final[Kind[ReasoningParser]] = Kind(
    "reasoning parser", "reasoning_parsers", "text.parsing.contract:ReasoningParser", flag="--reasoning-parser"
)
KINDS: Final[tuple[Kind[Any], ...]] = (
    BACKEND,
    MODEL,
    SCHEDULER,
    SCHEDULING_POLICY,
    VICTIMS,
    DRAFTER,
    POSTPROCESS,
    OBSERVER,
    STORE,
    CONNECTOR,
    ROUTER_POLICY,
    LAUNCHER,
    SCALING_POLICY,
    TOOL_PARSER,
    REASONING_PARSER,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a plugin."""

    distribution: str
    version: str
    entry_point: str
    """Name of the entry point, or of the built-in module."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a plugin, or one of its names, cannot be used."""

    origin: Origin
    cause: str
    hint: str
    """The remedy."""
    kind: Kind[Any] | None = None
    """Set with `name` if one name is rejected; otherwise the whole plugin is."""
    name: str | None = None

    def __str__(self) -> str:
        return f"plugin {self.origin.distribution} ({self.origin.entry_point}): {self.cause}"

    def concerns(self, kind: Kind[Any], name: str) -> bool:
        """Return True if it prevents the use of `name`."""
        if self.kind is not None:
            return (kind, name) == (self.kind, self.name)
        return self.origin.entry_point in (name, _plugin_of(name))


@dataclass(frozen=True, slots=True)
class PluginOffer:
    """One name that a plugin offers."""

    kind: Kind[Any]
    entry: Entry
    origin: Origin

    @property
    def name(self) -> str:
        """Name by which users select it."""
        return self.entry.name

    @property
    def label(self) -> str:
        """Kind and name, such as `backend cpu`."""
        return f"{self.kind.word} {self.name}"

    def load(self) -> type[Any]:
        """Import the class. Raises `PluginError` if that fails or if it is not of the right kind."""
        cls: type[Any] = self._attempt(self._import)
        return cls

    def make(self, *arguments: Any) -> Any:
        """Import the class and construct it. Raises `PluginError` if either fails."""
        return self._attempt(lambda: self._construct(*arguments))

    def probe(self) -> Availability:
        """Check if a backend can run here. Raises `PluginError` if the check itself fails."""
        answer: Availability = self._attempt(self._ask)
        return answer

    def _import(self) -> type[Any]:
        cls, base = _import_target(self.entry.target), _import_target(self.kind.base)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            hint = "derive it from that class, or correct the target of the Entry"
            raise PluginContractError(f"{self.entry.target} is not a subclass of {self.kind.base}", hint)
        if inspect.isabstract(cls):
            missing = " and ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            hint = f"implement {missing} as described in {self.kind.base}"
            raise PluginContractError(f"{self.entry.target} does not implement {missing}", hint)
        return cls

    def _construct(self, *arguments: Any) -> Any:
        made = self._import()(*arguments)
        if not isinstance(made, _import_target(self.kind.base)):
            raise PluginContractError(f"{self.entry.target} constructs {described(made)}", f"return a {self.kind.word}")
        return made

    def _ask(self) -> Availability:
        answer: Availability = self._import().probe()
        kept: bool = isinstance(answer, _import_target("fd_core.backends.contract:Availability"))
        if not kept:
            cause = f"{self.entry.target}.probe: expected an Availability, got {described(answer)}"
            raise PluginContractError(cause, "return Availability(True or False, the reason in one line)")
        return answer

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Run code of the plugin; the cause of what it raises is the `PluginContractError`."""
        try:
            return shielded(action)
        except PluginContractError as error:
            in_file = self.origin.distribution == _IN_FILE
            whose = self.label if in_file else f"{self.label} of plugin {self.origin}"
            hint = "correct the file" if in_file and error.hint == OWN_CODE else error.hint
            raise PluginError(f"{whose} cannot be used: {error}", field=self.kind.flag, hint=hint) from error


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The selected backend, and why."""

    name: str
    cls: type[Backend]
    reason: str


class Plugins:
    """Everything that built-ins and installed plugins offer; made by `discover`."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("fd_core")
        self._manager.add_hookspecs(hookspecs)
        self._offers: dict[Kind[Any], dict[str, list[PluginOffer]]] = {kind: {} for kind in KINDS}
        self.origins: list[Origin] = []
        """Plugins that were registered."""
        self.problems: list[Problem] = []
        """Why plugins and names are not usable."""

    @classmethod
    def discover(cls, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> Plugins:
        """Register the built-ins and the plugins of `entry_points`, by default all installed ones."""
        plugins = cls()
        core_version = importlib.import_module("fd_core").__version__
        for name in _BUILTIN_MODULES:
            plugins._admit(Origin("fd-core", core_version, name), partial(importlib.import_module, name))
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        found = []
        for point in entry_points:
            name, version = (point.dist.name, point.dist.version) if point.dist else ("unknown distribution", "?")
            found.append((Origin(name, version, point.name), point))
        for origin, point in sorted(found, key=str):
            plugins._admit(origin, point.load)
        plugins._refuse_contested_names()
        return plugins

    def offers(self, origin: Origin) -> tuple[PluginOffer, ...]:
        """Everything that one plugin offers, including names that others offer as well."""
        offers = (offer for by_name in self._offers.values() for same in by_name.values() for offer in same)
        return tuple(offer for offer in offers if offer.origin == origin)

    def offered(self, kind: Kind[Any]) -> dict[str, PluginOffer]:
        """Return what plugins offer of one kind, by name, without the names that several offer."""
        return {name: offers[0] for name, offers in self._offers[kind].items() if len(offers) == 1}

    def default_postprocessor(self, backend: str, framework: str) -> str:
        """Return the name of the default postprocessor: the backend's, or else the framework's."""
        return backend if backend in self.offered(POSTPROCESS) else framework

    def find(self, kind: Kind[Any], name: str) -> PluginOffer:
        """Return the offer called `name`, a file's class as `FILE.py:Class`, not imported. Raises `PluginError`."""
        if kind.files and _FILE_TARGET.search(name):
            return PluginOffer(kind, Entry(name, name, "from a file"), Origin(_IN_FILE, name, name))
        usable = self.offered(kind)
        if name in usable:
            return usable[name]
        for problem in self.problems:
            if problem.concerns(kind, name):
                raise PluginError(f"{kind.word} {name} cannot be used: {problem}", field=kind.flag, hint=problem.hint)
        hint = f"available: {', '.join(sorted(usable)) or 'none'}"
        if kind.files and name.endswith(".py"):
            hint += f"; for a class in a file use {name}:Class"
        if (plugin := _plugin_of(name)) in usable:
            hint += f"; use {plugin}"
        elif plugin in KNOWN_PLUGINS:
            hint += f"; `fdcore install {plugin}` installs the plugin"
        raise PluginError(f"unknown {kind.word} {name!r}", field=kind.flag, hint=hint)

    def load(self, kind: Kind[T], name: str) -> type[T]:
        """Import the class called `name`. Raises `PluginError` with the distribution and the cause."""
        return self.find(kind, name).load()

    def choose_backend(self, name: str = "auto") -> ChosenBackend:
        """Return the backend `name`; for `auto` the best available, none emulated. Raises `PluginError`."""
        if name == "auto":
            return self._best_backend()
        offer = self.find(BACKEND, name)
        availability = offer.probe()
        if not availability.available:
            hint = "omit --backend to use the best available one; `fdcore env` lists which can run here"
            raise PluginError(f"backend {name} cannot run here: {availability.reason}", field="--backend", hint=hint)
        return ChosenBackend(name, offer.load(), f"selected by name; {availability.reason}")

    def _best_backend(self) -> ChosenBackend:
        available: list[tuple[int, str, type[Backend], str]] = []
        passed_over = [str(problem) for problem in self.problems if problem.kind in (None, BACKEND)]
        for name, offer in sorted(self.offered(BACKEND).items()):
            try:
                backend = offer.load()
                if backend.auto_rank < 0:
                    continue
                availability = offer.probe()
            except PluginError as error:
                passed_over.append(f"{name}: {error.message}")
                continue
            if availability.available and not availability.emulated:
                available.append((backend.auto_rank, name, backend, availability.reason))
            else:
                passed_over.append(f"{name}: {availability.reason}")
        if not available:
            message = "no backend can run here: " + ("; ".join(passed_over) or "none is registered")
            hint = "install the CPU backend's framework: pip install 'fd-core[cpu]'"
            raise PluginError(message, field="--backend", hint=hint)
        _, name, backend, reason = max(available, key=lambda candidate: candidate[:2])
        return ChosenBackend(
            name, backend, "; ".join([f"best available: {reason}", *(f"not {why}" for why in passed_over)])
        )

    def _admit(self, origin: Origin, load: Callable[[], Any]) -> None:
        try:
            module = shielded(load)
            check_module(module)
            self._manager.register(module, name=f"{origin.distribution}:{origin.entry_point}")
            offers = [offer for kind in KINDS for offer in self._ask(kind, module, origin)]
        except PluginContractError as error:
            self.problems.append(Problem(origin, str(error), error.hint))
            return
        except (pluggy.PluginValidationError, ValueError) as error:
            hint = "use the hook arguments of fd_core/hookspecs.py, and one entry point per module"
            self.problems.append(Problem(origin, " ".join(str(error).split()), hint))
            return
        self.origins.append(origin)
        for offer in offers:
            self._offers[offer.kind].setdefault(offer.name, []).append(offer)

    def _ask(self, kind: Kind[Any], module: ModuleType, origin: Origin) -> list[PluginOffer]:
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not module]
        hook = self._manager.subset_hook_caller(kind.hook, others)
        answers: list[object] = shielded(hook)
        return [PluginOffer(kind, entry, origin) for answer in answers for entry in checked_entries(kind.hook, answer)]

    def _refuse_contested_names(self) -> None:
        for kind in KINDS:
            for name, offers in self._offers[kind].items():
                if len(offers) > 1:
                    givers = " and ".join(offer.origin.distribution for offer in offers)
                    cause = f"the {kind.word} name {name!r} is offered by {givers}"
                    hint = "uninstall one of them, or rename your own"
                    self.problems.append(Problem(offers[-1].origin, cause, hint, kind=kind, name=name))


@cache
def installed_plugins() -> Plugins:
    """Discover the plugins of this environment, once in a process."""
    return Plugins.discover()


def _plugin_of(name: str) -> str:
    """Return the short name of the plugin that would offer `name` if it is one of the project's."""
    base = name.partition("+")[0]
    return _PLUGIN_OF.get(base, base)


def blamed_on_file(error: BaseException) -> PluginError | None:
    """Return the error to show if code of a `FILE.py:Class` raised this; None if other code did."""
    own = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(_FILE_MODULE)
    ]
    if not own:
        return None
    code, line = own[-1]
    where = f"{code.co_filename}, line {line}, in {code.co_qualname}"
    return PluginError(f"{where}: {type(error).__name__}: {error}", hint="correct the file")


def _import_target(target: str) -> Any:
    module, _, attribute = target.rpartition(":")
    if _FILE_TARGET.search(target):
        return getattr(_module_of_file(Path(module).expanduser().resolve()), attribute)
    return getattr(importlib.import_module(module), attribute)


@cache
def _module_of_file(path: Path) -> ModuleType:
    """Import a file that is in no package, once."""
    if not path.is_file():
        raise PluginContractError(f"file {path} does not exist", "use FILE.py:Class with the path of an existing file")
    name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginContractError(f"{path} cannot be imported", "use FILE.py:Class with the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    # Classes with annotations, such as dataclasses, look up their module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
