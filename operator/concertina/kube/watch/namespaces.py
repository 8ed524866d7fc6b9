"""Set of the namespaces that match a label selector, kept up to date by a watch."""

from __future__ import annotations

from collections.abc import Callable

from concertina.kube.client import Client
from concertina.kube.reflector import Reflector
from concertina.kube.resources import NAMESPACES


class SelectedNamespaces:
    """Namespaces whose labels match a selector.

    The API server's watch reports a namespace as ADDED when its labels begin to match, and as DELETED when they no
    longer match.
    """

    def __init__(
        self, client: Client, selector: str, added: Callable[[str], None], removed: Callable[[str], None]
    ) -> None:
        """Create the set, which is empty until the first list.

        Args:
            client: Client of the API server.
            selector: Label selector for namespaces.
            added: Function to call for each namespace that begins to match after the first list.
            removed: Function to call for each namespace that no longer matches.
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
