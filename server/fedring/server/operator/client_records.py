"""The clients that operators see and forget."""

from collections.abc import Sequence

from fedring.daemon.wording import counted
from fedring.rpc.errors import ClientInUse, NoSuchClient
from fedring.server.operator.listings import limit_of
from fedring.server.operator.summaries import why_busy
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal, printable, rfc3339
from fedring.server.state.lead import absent
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fed


class ClientRecords:
    """Lists clients, and forgets those that will not come back."""

    def __init__(self, rounds: Rounds, sessions: Sessions, facts: Facts, journal: Journal) -> None:
        self._rounds, self._sessions = rounds, sessions
        self._facts, self._updates, self._journal = facts, facts.store.updates, journal

    async def list(self, request: pb.ListRequest) -> pb.ClientList:
        """Return a page of clients: those in session, then those away.

        Only the rows of the page are made, because there may be very many clients.
        """
        counts = await self._facts.db(self._updates.counts)
        held, sessions, search = self._rounds.turns.jobs, self._sessions, request.search
        here = sorted(each.client_id for each in sessions.open if request.state in ("", _state_of(each)))
        gone = counts.keys() - {each.client_id for each in sessions.open} if request.state in ("", "away") else ()
        names = [name for name in (*here, *sorted(gone)) if search in name]
        page = names[request.skip : request.skip + limit_of(request)]
        gone_as = absent(self._facts.lead)
        rows = [_row(sessions.get(name), name, counts.get(name, 0), held.get(name, ()), gone_as) for name in page]
        return pb.ClientList(clients=rows, total=len(names))

    async def forget(self, request: pb.ForgetClientRequest) -> pb.ForgottenClient:
        """Forget a client with its updates.

        Raises:
            NoSuchClient: if no update of it was ever accepted.
            ClientInUse: if it is in session, if its update is in an open round, or if that is not known yet.
        """
        name = request.client_id
        count = (await self._facts.db(self._updates.counts))[name]
        if count:
            self._check_unused(name)
            with self._sessions.barred(name):
                count = await self._facts.db(self._facts.forget_client, name)
        if not count:
            raise NoSuchClient(f"no update of {printable(name[:128])!r} was ever accepted: see `flctl clients`")
        text = f"{name} was forgotten, with {counted(count, 'update')}"
        self._journal.write("client_forgotten", text, client_id=name)
        return pb.ForgottenClient(client_id=name, updates=count)

    def _check_unused(self, name: str) -> None:
        """Check that a client is away, and in no open round."""
        if self._sessions.get(name) is not None:
            raise ClientInUse(f"{name} is in session: stop its fl-client first")
        if self._rounds.interrupted.rows:  # it is not known yet whose updates they have
            raise ClientInUse(f"the server has just started, and may still count an update of {name}: try again")
        for open_ in self._rounds:
            if name in open_.accepted:
                raise ClientInUse(f"an update of {name} is in {open_.title}: wait until the round has ended")


def _state_of(session: Session) -> str:
    return "watching" if session.matched else "joined"


def _row(session: Session | None, name: str, updates: int, held: Sequence[int], absent_as: str) -> pb.Client:
    if session is None:
        return pb.Client(client_id=name, state=absent_as, updates=updates)
    return pb.Client(
        client_id=name,
        state=_state_of(session),
        activity=fed.Activity.ValueType(session.activity),
        progress=session.progress,
        software=session.software,
        address=session.address,
        last_seen_at=rfc3339(session.last_seen),
        updates=updates,
        labels=session.labels,
        late_round=session.work.round if session.late_since else 0,
        late_job=session.work.job_id if session.late_since else 0,
        late_since=rfc3339(session.late_since),
        max_jobs=session.max_jobs,
        jobs=held,
        busy=why_busy(held, session.max_jobs, session.unapproved),
    )
