"""The LoRA adapters of the cluster: their names, and which adapters the workers must have. Pure.

A name is one that clients may give as the model. It is `loading` until every worker has the adapter, and then serves
requests. An adapter whose name is removed, or given to another one, stays at the workers until no request uses it: one
that is rescheduled needs it again. Requests, KV and workers name an adapter by its digest only, so a name that is used
again for other weights shares nothing with the former ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from baton.core.commands import AdapterSource, SetAdapters
from baton.core.errors import DuplicateRequest, InvalidRequest, NotFound
from baton.core.names import model_name_error
from coordinator.policy.choice import Choice, Stage


@dataclass(frozen=True, slots=True)
class Adapter:
    """`created` is when it was loaded, in Unix seconds."""

    name: str
    source: AdapterSource
    created: int


class AdapterTable:
    """`model_name` is what clients call the model itself: no adapter may have that name."""

    def __init__(self, model_name: str = "", max_adapters: int = 16, max_rank: int = 64) -> None:
        self._model_name, self.max_adapters, self.max_rank = model_name, max_adapters, max_rank
        self._named: dict[str, Adapter] = {}
        self._loading: dict[str, Adapter] = {}
        self._retired: dict[str, AdapterSource] = {}  # by digest

    def __iter__(self) -> Iterator[Adapter]:
        """The adapters that clients may choose, in the order of their loading."""
        return iter(self._named.values())

    def get(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def chosen(self, name: str, model: str, param: str = "model") -> str:
        """Returns the digest of the adapter that a client names; empty if it names the `model` itself.

        Raises:
            NotFound: there is neither.
        """
        if name == model:
            return ""
        if (adapter := self._named.get(name)) is None:
            shown = name[:100].encode("ascii", "backslashreplace").decode()
            served = ", ".join(f"'{each}'" for each in (model, *self._named))
            message = f"the model '{shown}' does not exist; {served} {'are' if self._named else 'is'} served"
            raise NotFound(message, code="model_not_found", param=param)
        return adapter.source.digest

    def in_use(self, choices: Iterable[Choice]) -> dict[str, Any] | None:
        """Returns how many adapters may be loaded (`max`), and the names of those that choices use, `running` and
        `waiting`; None without adapters."""
        if not self._named:
            return None
        names = {adapter.source.digest: adapter.name for adapter in self}
        used = {(c.stage is Stage.QUEUED, names[c.request.adapter]) for c in choices if c.request.adapter in names}
        running, waiting = ([name for queued, name in sorted(used) if queued is state] for state in (False, True))
        return {"max": self.max_adapters, "running": running, "waiting": waiting}

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raises InvalidRequest or DuplicateRequest if no adapter can be loaded under this name now; with `replace`
        the name may be that of another adapter, whose place the new one takes."""
        if wrong := model_name_error(name):
            raise InvalidRequest(f"lora_name {wrong}", param="lora_name")
        if name == self._model_name:
            raise InvalidRequest(f"lora_name {name!r} is the name of the model", param="lora_name")
        if name in self._loading:
            raise DuplicateRequest(f"the lora adapter '{name}' is already being loaded", param="lora_name")
        if name in self._named and not replace:
            message = f"The lora adapter '{name}' has already been loaded. Set load_inplace to replace it."
            raise InvalidRequest(message, param="lora_name")
        if len({*self._named, *self._loading, name}) > self.max_adapters:
            message = f"{self.max_adapters} adapters are loaded; unload one, or raise --max-loras"
            raise InvalidRequest(message, param="lora_name")

    def load(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Begins to load an adapter: workers must have it from now on. Raises as `check_name` does."""
        self.check_name(adapter.name, replace=replace)
        self._loading[adapter.name] = adapter

    def loaded(self, adapter: Adapter) -> None:
        """Makes an adapter that was loading one that clients may choose."""
        del self._loading[adapter.name]
        self._retire(self._named.get(adapter.name))
        self._named[adapter.name] = adapter

    def failed(self, adapter: Adapter) -> None:
        """Ends the loading of an adapter."""
        self._retire(self._loading.pop(adapter.name, None))

    def unload(self, name: str) -> None:
        """Removes a name; running requests keep its adapter. Raises NotFound."""
        if name not in self._named:
            raise NotFound(f"The lora adapter '{name[:100]}' cannot be found.", param="lora_name")
        self._retire(self._named.pop(name))

    def release(self, in_use: Collection[str]) -> bool:
        """Drops adapters without a name that no request uses; `in_use` are the digests of all requests. Returns whether
        `required` has changed."""
        before = self.required
        self._retired = {digest: source for digest, source in self._retired.items() if digest in in_use}
        return self.required != before

    @property
    def retired(self) -> bool:
        """Whether there are adapters without a name."""
        return bool(self._retired)

    @property
    def required(self) -> SetAdapters:
        """What every worker must have."""
        named = (adapter.source for adapter in (*self._named.values(), *self._loading.values()))
        sources: dict[str, AdapterSource] = {}
        for source in (*named, *self._retired.values()):
            sources.setdefault(source.digest, source)
        return SetAdapters(tuple(sources[digest] for digest in sorted(sources)), self.max_rank)

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._retired[adapter.source.digest] = adapter.source
