"""Pages: none lost, none freed twice, counts of users right, and shared only by what begins alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.serve.kv_cache import PagePool, SequencePages


def sequence_of(pool: PagePool, tokens: list[int], root: str | None = None) -> tuple[SequencePages, int]:
    pages = SequencePages(pool, root)
    cached = pages.match(tokens)
    assert pages.grow(len(tokens))
    pages.publish(tokens, len(tokens))
    return pages, cached


@pytest.mark.quick
def test_prompts_that_begin_alike_share_whole_pages() -> None:
    pool = PagePool(16, 4)
    first, cached = sequence_of(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached == 0
    second, cached = sequence_of(pool, [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert cached == 4
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1]
    assert pool.users(first.pages[0]) == 2
    pool.check([first, second])
    assert pool.used == 5


def test_the_same_tokens_after_others_are_another_page() -> None:
    pool = PagePool(16, 2)
    sequence_of(pool, [1, 2, 3, 4])
    _, cached = sequence_of(pool, [3, 4, 3, 4])
    assert cached == 0
    _, cached = sequence_of(pool, [1, 2, 3, 4], root="adapter")
    assert cached == 0


def test_pages_left_behind_are_used_again_until_they_are_needed() -> None:
    pool = PagePool(4, 2)
    pages, _ = sequence_of(pool, [1, 2, 3, 4])
    pages.release()
    assert (pool.idle, pool.available) == (2, 4)
    again, cached = sequence_of(pool, [1, 2, 3, 4])
    assert cached == 4
    again.release()
    other, _ = sequence_of(pool, [7, 7, 7, 7, 7, 7])
    pool.check([other])
    # The end of the chain went first, its beginning is still there.
    other.release()
    _, cached = sequence_of(pool, [1, 2, 3, 4])
    assert cached == 2


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pool = PagePool(4, 2)
    first, _ = sequence_of(pool, [1, 2])
    second = SequencePages(pool)
    assert second.match([1, 2]) == 2
    copy = second.own(0)
    assert copy == (first.pages[0], second.pages[0])
    assert first.pages != second.pages
    pool.check([first, second])
    third = SequencePages(pool)
    third.grow(2)
    assert third.own(0) is None


def test_a_pool_that_is_full_says_so_and_stays_as_it_was() -> None:
    pool = PagePool(2, 2)
    first = SequencePages(pool)
    assert first.grow(3)
    second = SequencePages(pool)
    assert not second.grow(1)
    assert pool.allocate() is None
    pool.check([first, second])
    with pytest.raises(RuntimeError, match="no user"):
        first.release() or pool.release(0)


def test_without_sharing_nothing_is_found() -> None:
    pool = PagePool(8, 2, sharing=False)
    pages, _ = sequence_of(pool, [1, 2, 3, 4])
    pages.release()
    assert pool.idle == 0
    assert sequence_of(pool, [1, 2, 3, 4])[1] == 0


def test_forgotten_pages_are_free() -> None:
    pool = PagePool(8, 2)
    kept, _ = sequence_of(pool, [5, 6])
    pages, _ = sequence_of(pool, [1, 2, 3, 4])
    pages.release()
    pool.forget()
    pool.check([kept])
    assert sequence_of(pool, [5, 6])[1] == 0


@pytest.mark.quick
@settings(max_examples=60)
@given(st.data())
def test_books_balance_whatever_is_done(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3)))
    alive: list[tuple[SequencePages, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["start", "extend", "publish", "own", "release"]))
        if action == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
            pages = SequencePages(pool)
            held = pages.match(tokens)
            assert held <= len(tokens)
            if pages.grow(len(tokens)):
                alive.append((pages, tokens))
            else:
                pages.release()
        elif alive:
            number = data.draw(st.integers(0, len(alive) - 1))
            pages, tokens = alive[number]
            if action == "extend":
                tokens.append(data.draw(st.integers(0, 1)))
                if not pages.grow(len(tokens)):
                    tokens.pop()
            elif action == "publish":
                pages.publish(tokens, data.draw(st.integers(0, len(tokens))))
            elif action == "own" and pool.available and pages.pages:
                pages.own(len(pages.pages) - 1)
            elif action == "release":
                pages.release()
                del alive[number]
        pool.check(pages for pages, _ in alive)
    for pages, _ in alive:
        pages.release()
    pool.check([])
    assert pool.available == pool.pages
