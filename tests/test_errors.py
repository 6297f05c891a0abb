"""What is said once is said once, to whom it is meant for, and costs nothing after."""

from __future__ import annotations

import logging
import warnings

import pytest

from capibara import errors
from capibara.errors import say_again, say_once, unsaid

logger = logging.getLogger("capibara.test")
pytestmark = pytest.mark.usefixtures("nothing_said_yet")


class Costly:
    """Counts how often somebody writes it out."""

    written = 0

    def __str__(self) -> str:
        self.written += 1
        return "costly"


@pytest.mark.quick
def test_a_log_line_is_said_once_a_key_and_formatted_only_then(caplog: pytest.LogCaptureFixture) -> None:
    value = Costly()
    with caplog.at_level(logging.INFO, "capibara.test"):
        told = [say_once(logger, key, "%s is %d", value, 1, level=logging.INFO) for key in ("a", "a", "b")]
        say_once(logger, "a", "something else")
    assert told == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == [
        "costly is 1 (said once)",
        "costly is 1 (said once)",
        "something else (said once)",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert {record.filename for record in caplog.records} == {"test_errors.py"}
    say_again()
    assert say_once(logger, "a", "something else")


def test_a_warning_has_its_class_and_the_callers_line() -> None:
    value = Costly()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            say_once(DeprecationWarning, "a", "%s, 100%% sure", value)
        say_once(UserWarning, None, "100% as it is written")
    assert [str(one.message) for one in caught] == ["costly, 100% sure", "100% as it is written"]
    assert [one.category for one in caught] == [DeprecationWarning, UserWarning]
    assert {one.filename for one in caught} == {__file__}
    assert value.written == 1


def test_what_was_said_takes_bounded_room(caplog: pytest.LogCaptureFixture) -> None:
    quiet = logging.getLogger("capibara.test.quiet")
    quiet.disabled = True
    for number in range(20_000):
        say_once(quiet, number, "%d", number)
    assert len(errors._SAID) <= errors._SAID.maxsize
    assert not say_once(quiet, 19_999, "%d", 19_999)


def test_what_is_only_looked_at_is_not_said_and_not_remembered(caplog: pytest.LogCaptureFixture) -> None:
    with unsaid():
        assert not say_once(logger, "key", "it fell back")
    assert not caplog.records
    assert say_once(logger, "key", "it fell back")
    assert len(caplog.records) == 1
