"""The parts of fl-server, put together: what its services and chores are given."""

from dataclasses import dataclass

from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.model.testset import TestSet
from fedring.server.round.jobs import Jobs
from fedring.server.round.metrics import Metrics
from fedring.server.round.opening import RoundOpener
from fedring.server.round.rounds import Rounds
from fedring.server.round.runner import RoundRunner
from fedring.server.round.secure_rounds import SecureRounds
from fedring.server.round.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal
from fedring.server.update.acceptance import Acceptor


@dataclass(frozen=True, slots=True)
class Parts:
    """What fl-server is made of; each part knows only those that it needs."""

    facts: Facts
    models: Models
    sessions: Sessions
    journal: Journal
    metrics: Metrics
    rounds: Rounds
    secure: SecureRounds
    runner: RoundRunner
    jobs: Jobs
    acceptor: Acceptor


def assemble(config: ServerConfig, facts: Facts, models: Models, sessions: Sessions) -> Parts:
    """Put the parts of a server together; none of them runs yet."""
    journal, metrics = Journal(), Metrics()
    rounds = Rounds(facts, sessions, journal, metrics)
    test_set = TestSet(facts.blobs, config.data_root, models.maker.offered)
    opener = RoundOpener(rounds, facts, models, sessions, test_set, config)
    secure = SecureRounds(rounds, facts, sessions, metrics, config)
    runner = RoundRunner(rounds, secure, facts, models, sessions, journal, metrics, test_set, config)
    jobs = Jobs(opener, runner, rounds, facts, journal, metrics)
    return Parts(facts, models, sessions, journal, metrics, rounds, secure, runner, jobs, Acceptor(rounds, facts))
