"""Set of the namespaces that match a label selector, kept up to date by a watch."""

from __future__ import annotations

from collections.abc import Callable

from concertina.kube.client import Client
from concertina.kube.reflector import Reflector
from concertina.kube.resources import NAMESPACES


class SelectedNamespaces:
    """Namespaces whose labels match the selector.

    When labels of a namespace begin or cease to match, the API server's watch reports the namespace as ADDED or
    DELETED.
    """

    def __init__(
        self, client: Client, selector: str, added: Callable[[str], None], removed: Callable[[str], None]
    ) -> None:
        """Start without namespaces.

        Args:
            client: Client of the API server.
            selector: Label selector for namespaces.
            added: Function to call for each namespace that is selected after the first list.
            removed: Function to call for each namespace that is no longer selected.
        """
        self._names: set[str] = set()
        self._added = added
        self._removed = removed
        self.reflector = Reflector(
            client, NAMESPACES, lambda obj: str(obj["metadata"]["name"]), self._changed, labels=selector
        )

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._names

    def _changed(self, old: str | None, new: str | None) -> None:
        if new is not None:
            self._names.add(new)
            if self.reflector.synced.is_set():
                self._added(new)
        elif old is not None:
            self._names.discard(old)
            self._removed(old)
