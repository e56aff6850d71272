"""What clients say of a new model."""

from fedring.rpc.contract import MAX_FIGURE
from fedring.rpc.errors import BadRequest, UnknownRound
from fedring.server.round.events import Phase, Round
from fedring.server.state.rows import ModelRow
from fedring.train.metrics import check_metrics
from fedring.v1 import federation_pb2 as pb


def classified(report: pb.EvaluationReport) -> int:
    """Return among how many samples `correct` counts: all of them, unless the client says otherwise."""
    return report.classified if report.HasField("classified") else report.total


def check_evaluation(
    report: pb.EvaluationReport, client: str, round_: Round | None, model: ModelRow | None, *, newest: int
) -> int:
    """Check that a report has sound counts, and answers an evaluation that is in progress.

    Args:
        report: What the client has sent.
        client: The client's id.
        round_: The round in progress, if there is one.
        model: The newest model.
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
    if round_ is None or not current or round_.phase is not Phase.PUBLISHED:
        if 0 < report.round <= newest and not current:
            raise UnknownRound(f"the evaluation of round {report.round} is over", reason="round_closed")
        raise UnknownRound(f"round {report.round} is not being evaluated")
    if client not in round_.evaluators:
        raise UnknownRound(f"{client} was not asked to evaluate round {report.round}", reason="not_selected")
    if model is None or report.model_digest != model.digest:
        text = f"round {report.round} evaluates another model than {report.model_digest[:80]!r}"
        raise BadRequest(text, reason="wrong_model")
    return model.version
