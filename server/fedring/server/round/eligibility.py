"""Checks of who may deliver updates and report evaluations."""

from collections.abc import Container

from fedring.rpc.contract import MAX_FIGURE
from fedring.rpc.errors import BadRequest, UnknownRound
from fedring.server.round.events import Phase, Round
from fedring.server.state.rows import ModelRow
from fedring.train.metrics import check_metrics
from fedring.v1 import federation_pb2 as pb


def check_eligible(round_: Round | None, number: int, client: str, *, workers: Container[str] | None = None) -> None:
    """Check that a client may deliver its update of a round now.

    Args:
        round_: The round in progress, if there is one.
        number: The number of the round that the update is for.
        client: The client's id.
        workers: The clients that have trained as members of the round's group; None if the round has no group, or if
            nobody remembers its members.

    Raises:
        UnknownRound: "unknown_round" if another round, or none, is in progress; "round_closed" if it takes no more
            updates; "not_selected" if the client was not asked; "not_a_worker" if it has not trained with the group.
    """
    if round_ is None or number != round_.number:
        raise UnknownRound(f"round {number} is not open")
    if round_.phase is not Phase.TRAINING:
        raise UnknownRound(f"round {number} is closed", reason="round_closed")
    if client not in round_.selected:
        raise UnknownRound(f"{client} was not selected for round {number}", reason="not_selected")
    if workers is not None and client not in workers:
        raise UnknownRound(f"{client} has not trained with the group", reason="not_a_worker")


def classified(report: pb.EvaluationReport) -> int:
    """Return the number of samples with a class.

    These are all of them, unless the client says otherwise.
    """
    return report.classified if report.HasField("classified") else report.total


def check_evaluation(
    report: pb.EvaluationReport, client: str, round_: Round | None, model: ModelRow | None, *, newest: int
) -> int:
    """Check the counts of a report, and its round.

    Args:
        report: What the client has sent.
        client: The client's id.
        round_: The round in progress, if there is one.
        model: The model that it has published.
        newest: The number of the newest round that this server knows of; 0 = none.

    Returns:
        The version of the model that it is about.

    Raises:
        BadRequest: "bad_evaluation", "bad_metrics" or "wrong_model".
        UnknownRound: "round_closed" if the evaluation is over, "unknown_round" if it never began, and "not_selected"
            if the client was not asked.
    """
    if not (report.correct <= classified(report) <= report.total < 2**48 and abs(report.loss_sum) <= MAX_FIGURE):
        text = (
            "correct must be at most classified, that at most total, total below 2^48, and loss_sum a number of at "
            f"most {MAX_FIGURE:g}"
        )
        raise BadRequest(text, reason="bad_evaluation")
    try:
        check_metrics(report.metrics)
    except ValueError as error:
        raise BadRequest(str(error), reason="bad_metrics") from None
    current = round_ is not None and round_.number == report.round
    # A late report is no fault of the client, so it gets a reason of its own.
    if round_ is None or not current or round_.phase is not Phase.PUBLISHED:
        if 0 < report.round <= newest and not current:
            raise UnknownRound(f"the evaluation of round {report.round} is over", reason="round_closed")
        raise UnknownRound(f"round {report.round} is not being evaluated")
    if client not in round_.evaluators:
        raise UnknownRound(f"{client} was not asked to evaluate round {report.round}", reason="not_selected")
    # Counts of another model would make the sums of this one wrong, and nothing would show it.
    if model is None or report.model_digest != model.digest:
        text = f"round {report.round} evaluates another model than {report.model_digest[:80]!r}"
        raise BadRequest(text, reason="wrong_model")
    return model.version
