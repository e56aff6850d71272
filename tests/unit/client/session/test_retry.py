"""Which failed calls a client tries again, and when: a table, without calls and without time."""

import pytest
from grpc import StatusCode

from fedring.client.session.retry import FIRST_SECONDS, MOST_SECONDS, MOST_TRIES, RetryPolicy, Verdict, most_seconds

PLAIN = RetryPolicy()
ALL_LATER = RetryPolicy(dict.fromkeys(StatusCode, Verdict.LATER))
LATER, JOIN, AGAIN, DROP = Verdict.LATER, Verdict.JOIN, Verdict.AGAIN, Verdict.DROP


@pytest.mark.parametrize(
    ("status", "reason", "verdict", "reconnect"),
    [
        (StatusCode.UNAVAILABLE, "unavailable", LATER, False),
        (StatusCode.UNAVAILABLE, "a reason that is not known", LATER, False),
        (StatusCode.RESOURCE_EXHAUSTED, "overloaded", LATER, False),
        (StatusCode.CANCELLED, "cancelled", LATER, False),
        (StatusCode.DATA_LOSS, "data_loss", LATER, False),
        (StatusCode.DEADLINE_EXCEEDED, "stalled", LATER, True),
        (StatusCode.INTERNAL, "internal", LATER, True),
        (StatusCode.UNKNOWN, "unknown", LATER, True),
        (StatusCode.UNAUTHENTICATED, "no_session", JOIN, False),
        (StatusCode.ABORTED, "superseded", JOIN, False),
        (StatusCode.CANCELLED, "gone", JOIN, False),
        (StatusCode.INVALID_ARGUMENT, "bad_request", AGAIN, False),
        (StatusCode.UNIMPLEMENTED, "unknown_method", AGAIN, True),
        (StatusCode.INVALID_ARGUMENT, "bad_address", DROP, False),
        (StatusCode.NOT_FOUND, "unknown_model", DROP, False),
        (StatusCode.ALREADY_EXISTS, "already_accepted_other", DROP, False),
        (StatusCode.PERMISSION_DENIED, "not_allowed", DROP, False),
        (StatusCode.FAILED_PRECONDITION, "unknown_round", DROP, False),
        (StatusCode.OUT_OF_RANGE, "out_of_range", DROP, False),
    ],
)
def test_a_failure_of_a_call_has_one_verdict(
    status: StatusCode, reason: str, verdict: Verdict, *, reconnect: bool
) -> None:
    step = PLAIN.after(status, reason)
    assert (step.verdict, step.reconnect) == (verdict, reconnect)


def test_damaged_bytes_are_sent_three_times_and_the_last_time_over_a_new_connection() -> None:
    steps = [PLAIN.after(StatusCode.INVALID_ARGUMENT, "bad_request", damages=tries) for tries in range(MOST_TRIES)]
    assert [step.verdict for step in steps] == [AGAIN, AGAIN, DROP]
    assert [step.reconnect for step in steps] == [False, True, False]


def test_damaged_bytes_do_not_change_what_other_failures_mean() -> None:
    for damages in range(MOST_TRIES):
        assert PLAIN.after(StatusCode.UNAVAILABLE, "", damages=damages).verdict is LATER
        assert PLAIN.after(StatusCode.PERMISSION_DENIED, "", damages=damages).verdict is DROP


def test_a_difference_by_reason_precedes_one_by_status_and_both_precede_what_is_common() -> None:
    policy = RetryPolicy({"too_large": DROP, "bad_chunk": AGAIN, StatusCode.INVALID_ARGUMENT: LATER})
    assert policy.after(StatusCode.RESOURCE_EXHAUSTED, "too_large").verdict is DROP
    assert policy.after(StatusCode.RESOURCE_EXHAUSTED, "overloaded").verdict is LATER
    assert policy.after(StatusCode.INVALID_ARGUMENT, "bad_chunk").verdict is AGAIN
    assert policy.after(StatusCode.INVALID_ARGUMENT, "bad_request").verdict is LATER
    assert {ALL_LATER.after(status, "gone").verdict for status in StatusCode} == {LATER}


def test_the_longest_wait_doubles_with_each_failure_up_to_a_limit() -> None:
    waits = [PLAIN.after(StatusCode.UNAVAILABLE, "", failures=failures).most_seconds for failures in range(7)]
    assert waits == [FIRST_SECONDS, 0.4, 0.8, 1.6, 3.2, MOST_SECONDS, MOST_SECONDS]
    assert most_seconds(10**9) == MOST_SECONDS
