"""Namespaces that a label selector selects, as they come and go."""

from __future__ import annotations

from collections.abc import Callable

from concertina.kube.client import Client
from concertina.kube.reflector import Reflector
from concertina.kube.resources import NAMESPACES


class SelectedNamespaces:
    """Namespaces whose labels match the selector.

    The API server's watch sends ADDED or DELETED when the labels of a namespace begin or cease to match.
    """

    def __init__(
        self, client: Client, selector: str, added: Callable[[str], None], removed: Callable[[str], None]
    ) -> None:
        """Start without namespaces.

        Args:
            added: Callback for namespaces that are selected after the first list.
            removed: Callback for all namespaces that are no longer selected.
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
