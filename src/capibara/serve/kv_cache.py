"""Which page of the cache holds what: counts of users, pages shared by prompts that begin alike, pages to use again.

A page is in one of three states: free (nothing of worth in it), in use (by one sequence or more), or idle: in use by
none, with the keys of tokens that may come again. Idle pages are taken, the longest unused first, when no page is free.

Prompts share whole pages. What a page holds hangs on all tokens before it, so pages form chains: a page is known by the
number of the page before it in its chain and by its own tokens. The key has the tokens themselves and not a hash of
them, so that two prompts never share by accident.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from capibara.errors import rule_error

__all__ = ["PagePool", "SequencePages"]

_Key = tuple[Hashable, tuple[int, ...]]


class PagePool:
    """The pages of a cache, by number. It holds no arrays: the numbers index the engine's pools."""

    def __init__(self, pages: int, page_size: int, *, sharing: bool = True) -> None:
        if pages < 1 or page_size < 1:
            raise rule_error("A cache has a page or more, of a token or more", (pages, page_size), "raise both to 1")
        self.pages = pages
        self.page_size = page_size
        self.sharing = sharing
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._links = itertools.count()
        self._page_of: dict[_Key, int] = {}
        self._known: dict[int, tuple[_Key, int]] = {}  # page -> its key, and its number in the chain
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.pages - self.available

    @property
    def idle(self) -> int:
        """Pages that no sequence uses, with keys that may be used again."""
        return len(self._idle)

    def users(self, page: int) -> int:
        return self._users[page]

    def allocate(self) -> int | None:
        """A page of one's own; None when all are in use."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            key, _ = self._known.pop(page)
            del self._page_of[key]
        else:
            return None
        self._users[page] = 1
        return page

    def use(self, page: int) -> None:
        """One user more."""
        self._users[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int) -> None:
        """One user less; the last one leaves it idle where its keys are known, else free."""
        if self._users[page] < 1:
            raise RuntimeError(f"page {page} is released and has no user")
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._known:
                self._idle[page] = None
            else:
                self._free.append(page)

    def look_up(self, before: Hashable, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(page, its link) of these tokens after the link `before`, where one is known."""
        page = self._page_of.get((before, tokens)) if self.sharing else None
        return None if page is None else (page, self._known[page][1])

    def publish(self, page: int, before: Hashable, tokens: tuple[int, ...]) -> int:
        """Others may use the page, whose keys are of these tokens after the link `before`; its own link."""
        known = self.look_up(before, tokens)
        if known is not None:  # computed twice, side by side: one of the two is enough
            return known[1]
        link = next(self._links)
        if self.sharing:
            self._page_of[before, tokens] = page
            self._known[page] = ((before, tokens), link)
        return link

    def forget(self) -> None:
        """Nothing is known of any page any more: for new weights, whose keys are others."""
        self._page_of.clear()
        self._known.clear()
        self._free += self._idle
        self._idle.clear()

    def check(self, sequences: Iterable[SequencePages]) -> None:
        """Raise where counts are not those of these users, or where a page is lost, or in two places."""
        users = [0] * self.pages
        for sequence in sequences:
            for page in sequence.pages:
                users[page] += 1
        if users != self._users:
            wrong = [page for page in range(self.pages) if users[page] != self._users[page]]
            raise RuntimeError(f"pages {wrong[:8]} have other users than are counted")
        unused = [page for page in range(self.pages) if not users[page]]
        if sorted([*self._free, *self._idle]) != unused:
            raise RuntimeError("unused pages are not just those that are free or idle")
        if any(page in self._known for page in self._free) or any(page not in self._known for page in self._idle):
            raise RuntimeError("a free page is known, or an idle one is not")
        if {key: page for page, (key, _) in self._known.items()} != self._page_of:
            raise RuntimeError("what is known of pages is not what they are looked up by")


class SequencePages:
    """The pages of one sequence, in order."""

    def __init__(self, pool: PagePool, root: Hashable = None) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self._root = ("root", root)  # of another adapter the same tokens have other keys
        self._link: Hashable = self._root
        self._published = 0

    @property
    def room(self) -> int:
        """Tokens that the pages hold."""
        return len(self.pages) * self.pool.page_size

    def match(self, tokens: Sequence[int]) -> int:
        """Take the pages that hold a beginning of these tokens already; how many tokens that is."""
        size = self.pool.page_size
        for start in range(0, len(tokens) - size + 1, size):
            known = self.pool.look_up(self._link, tuple(tokens[start : start + size]))
            if known is None:
                break
            page, self._link = known
            self.pool.use(page)
            self.pages.append(page)
        self._published = len(self.pages)
        return self.room

    def lacking(self, tokens: int) -> int:
        """Pages to add before so many tokens fit."""
        return max(0, -(-tokens // self.pool.page_size) - len(self.pages))

    def grow(self, tokens: int) -> bool:
        """Have pages for so many tokens; False, and as it was, where the pool has not enough."""
        if tokens <= len(self.pages) * self.pool.page_size:  # as at most steps
            return True
        lacking = self.lacking(tokens)
        if lacking > self.pool.available:
            return False
        for _ in range(lacking):
            page = self.pool.allocate()
            assert page is not None
            self.pages.append(page)
        return True

    def own(self, number: int) -> tuple[int, int] | None:
        """Have the page of this number to oneself before it is written: (from, to) where its keys are to be copied.

        None where it is one's own already, and nobody else can come to use it.
        """
        page, pool = self.pages[number], self.pool
        if pool.users(page) == 1 and number >= self._published:
            return None
        new = pool.allocate()
        if new is None:
            raise RuntimeError("there is no page to copy to; ask for `available` first")
        self.pages[number] = new
        pool.release(page)
        return page, new

    def publish(self, tokens: Sequence[int], written: int) -> list[int]:
        """Let others use the full pages among the first `written` of these tokens; those that were not yet, now are."""
        size, first = self.pool.page_size, self._published
        if (first + 1) * size > written:  # as at most steps
            return []
        full = min(written, len(tokens)) // size
        while self._published < full:
            start = self._published * size
            page = self.pages[self._published]
            self._link = self.pool.publish(page, self._link, tuple(tokens[start : start + size]))
            self._published += 1
        return self.pages[first : self._published]

    def release(self) -> None:
        """Give all pages back, the last first: of idle pages the ends of chains then go before their beginnings."""
        while self.pages:
            self.pool.release(self.pages.pop())
        self._link, self._published = self._root, 0
