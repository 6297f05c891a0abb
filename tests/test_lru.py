"""A bounded memory keeps what was used last, whoever uses it."""

from __future__ import annotations

import threading

import pytest

from capibara.lru import LRU


@pytest.mark.quick
def test_it_is_bounded_and_keeps_what_was_used_last() -> None:
    recent: LRU[int, int] = LRU(100)
    for number in range(10_000):
        recent[number] = number
        assert recent.get(3) == 3 or number < 3, "what is used between others stays"
        assert len(recent) <= 100
    assert all(recent.get(number) == number for number in range(9_951, 10_000))
    assert recent.get(5_000) is None
    assert recent.get(5_000, "gone") == "gone"


def test_what_is_put_again_is_the_new_one() -> None:
    recent: LRU[str, int | None] = LRU(4)
    recent["a"] = 1
    recent["a"] = None
    assert recent.get("a", 2) is None
    assert not recent.add("a", 3)
    recent.pop("a")
    assert recent.add("a", 3)
    assert recent.get("a") == 3
    recent.clear()
    assert len(recent) == 0


def test_of_several_threads_one_adds() -> None:
    recent: LRU[int, int] = LRU(4096)
    added: list[int] = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for number in range(2_000):
            if recent.add(number, thread):
                added.append(number)
            assert recent.get(number) is not None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == list(range(2_000))
