"""Counts of chats, summed over some shards."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChatCounts:
    """Counts of chats, summed over some shards (see `data_manifest.ChatFacts`)."""

    trained: int = 0
    truncated: int = 0
    dropped: int = 0

    def __add__(self, other: ChatCounts) -> ChatCounts:
        return ChatCounts(self.trained + other.trained, self.truncated + other.truncated, self.dropped + other.dropped)


NO_CHATS = ChatCounts()
