"""The parts of fl-server, put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedring.server.asynchronous.rounds import AsynchronousRounds
from fedring.server.config import ServerConfig
from fedring.server.jobs.queue import Jobs
from fedring.server.jobs.runner import JobRunner
from fedring.server.jobs.starting import JobStarter
from fedring.server.model.models import Models
from fedring.server.operator.metrics import Metrics
from fedring.server.round.open_round import KindMaker
from fedring.server.running.client_reports import ClientReports
from fedring.server.running.keeping import Keeper
from fedring.server.running.opening import RoundOpener
from fedring.server.running.private_rounds import RoundPrivacy
from fedring.server.running.publishing import Publisher
from fedring.server.running.rounds import Rounds
from fedring.server.running.runner import RoundRunner
from fedring.server.secure.rounds import SecureRounds
from fedring.server.service.sweep import SessionSweep
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal
from fedring.server.update.acceptance import Acceptor
from fedring.server.update.receipts import FOLDER, Receipts

KINDS = (SecureRounds, AsynchronousRounds)
"""The kinds of rounds that a server has beside the plain one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one fl-server."""

    facts: Facts
    models: Models
    sessions: Sessions
    journal: Journal
    metrics: Metrics
    rounds: Rounds
    reports: ClientReports
    kinds: Sequence[KindMaker]
    opener: RoundOpener
    privacy: RoundPrivacy
    publisher: Publisher
    keeper: Keeper
    runner: RoundRunner
    starter: JobStarter
    jobs: Jobs
    acceptor: Acceptor
    receipts: Receipts
    sweep: SessionSweep


def assemble(
    config: ServerConfig, facts: Facts, models: Models, sessions: Sessions, more_kinds: Sequence[KindMaker] = ()
) -> Parts:
    """Put the parts of a server together.

    None of them runs yet. `more_kinds` are kinds of rounds beyond its own.
    """
    journal, metrics = Journal(), server_metrics()
    metrics.follow(facts)
    # From the bottom up: each part is given those that it uses.
    rounds = Rounds(facts.store.run_id, sessions, journal, metrics.rounds)
    own = [kind(rounds, facts, sessions, metrics.of_kinds[kind], config.tls.ca) for kind in KINDS]
    kinds = [*own, *more_kinds]
    reports = ClientReports(rounds, kinds, sessions, facts, journal, metrics.rounds)
    privacy = RoundPrivacy(
        facts,
        config.state_dir,
        lambda job: models.maker.job_models.schema_of(job),
        shared=bool(config.state_url),
    )
    opener = RoundOpener(rounds, kinds, facts, models, privacy, sessions, config)
    publisher = Publisher(rounds, facts, models, privacy, sessions, metrics.rounds)
    keeper = Keeper(rounds, facts, models, config)
    runner = RoundRunner(rounds, facts, publisher, keeper, sessions, metrics.rounds, config.listen)
    starter = JobStarter(rounds, facts, models)
    job_runner = JobRunner(starter, opener, runner, keeper, rounds, facts, journal)
    jobs = Jobs(job_runner, rounds, facts, journal, metrics.job_started, most=config.max_running_jobs)
    metrics.job_silent_since.set_function(lambda: jobs.silent_since)
    metrics.jobs.labels("running").set_function(lambda: len(jobs.running))
    metrics.jobs.labels("queued").set_function(lambda: jobs.waiting)
    receipts = Receipts(config.state_dir / FOLDER if config.audit_chain else None, facts.store.run_id)
    acceptor = Acceptor(rounds, facts, metrics.updates, receipts)
    sweep = SessionSweep(rounds, reports, sessions, config)
    rooms = (
        rounds,
        reports,
        kinds,
        opener,
        privacy,
        publisher,
        keeper,
        runner,
        starter,
        jobs,
        acceptor,
        receipts,
        sweep,
    )
    return Parts(facts, models, sessions, journal, metrics, *rooms)


def server_metrics() -> Metrics:
    """Declare all metrics of a server.

    Its kinds of rounds have some of their own.
    """
    return Metrics(KINDS)
