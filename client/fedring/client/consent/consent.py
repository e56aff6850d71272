"""The consent of a site to a job, asked before any work."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedring.client.consent.approval import Approval
from fedring.client.consent.card import MAX_CARD_BYTES, Card, card_of, job_facts
from fedring.client.consent.cards import CardError, Cards
from fedring.client.consent.code import InstalledCode
from fedring.client.consent.orders import Orders, Permit
from fedring.daemon.durable import replace_with_digest, text_after_digest
from fedring.train.orders.signed_job import BadOrder
from fedring.untrusted import parse_json
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

NOT_APPROVED = "not_approved"
"""The reason with which a client refuses a job while people at its site have to decide about it."""

FILE = "waiting.json"

_MOST_WAITING = 64  # jobs that are asked about with each heartbeat
_LONGEST_RUN = 128  # characters of its id

_Job = tuple[str, int, int]  # its run, epoch and number


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for which a site does not follow a command.

    Attributes:
        reason: A stable word.
        text: A sentence for people.
    """

    reason: str
    text: str


class Consent:
    """The consent of a site to jobs.

    Any thread may use it. What was approved is read from the state folder each time: another process writes it.

    Args:
        approval: The table [approval] of the client.
        state_dir: Its state folder.
        trusted: The entries of its list `trusted`.
        own: Its own names in the place of the job's, by key.
        orders: Check the signatures of operators; None = the site asks for none.

    Attributes:
        card: The name of the newest command's card; empty if nobody is asked.
        permit: What the newest command follows from; None if the site asks for no signature.
    """

    def __init__(
        self,
        approval: Approval,
        state_dir: Path,
        trusted: Sequence[str],
        own: Mapping[str, str],
        orders: Orders | None = None,
    ) -> None:
        self._orders = orders
        self.permit: Permit | None = None
        self._approval, self._cards = approval, Cards(state_dir)
        self._code = InstalledCode(trusted if approval.mode == "cards" else ())
        self._site = {"code": self._code.facts, "own": {key: name for key, name in own.items() if name}}
        self.card = ""
        self._path = state_dir / FILE
        # By job, the card that it waits for; None = it waits while the installed code is not that of the start.
        self._waiting: dict[_Job, Card | None] = {**self._kept()} if approval.mode == "cards" else {}

    def refusal(self, command: pb.TrainCmd) -> Refusal | None:
        """Return why this client does not train for a command.

        None if it may. Nobody is asked about a job whose signature is not good.
        """
        self.permit = None
        try:
            if self._orders is not None:
                self.permit = self._orders.permit(command)
        except BadOrder as error:
            log.warning("job %d is refused: %s", command.job.job_id, error)
            return Refusal(error.reason, str(error))
        if self._approval.mode == "off":
            return None
        if edited := self._code.changed():
            text = f"the installed source of {edited} has changed since fl-client was started: restart fl-client"
            self._wait(command, None, text)
            return Refusal(NOT_APPROVED, text)
        card = card_of(command, self._site, self._approval.free)
        self.card, why = card.name, self._note(command, card)
        return Refusal(NOT_APPROVED, why) if why else None

    def withdrawn(self, command: pb.TrainCmd) -> str:
        """Return the reason for which no update may leave any more.

        It is empty while the command's card is approved. Code that was changed since does not matter: what has trained
        is what was approved.
        """
        if self._approval.mode == "off":
            return ""
        card = card_of(command, self._site, self._approval.free)
        return NOT_APPROVED if self._note(command, card) else ""

    def permits(self, command: pb.TrainCmd) -> bool:
        """Return whether this client may train for a command.

        Nothing is noted, but for a new card.
        """
        try:
            if self._orders is not None:
                self._orders.permit(command)
        except BadOrder:
            return False
        if self._approval.mode == "off":
            return True
        return not (self._code.changed() or self._refusal(card_of(command, self._site, self._approval.free)))

    def refusal_to_evaluate(self, command: pb.EvaluateCmd) -> Refusal | None:
        """Return why this client does not evaluate a job's model.

        It may if a card of this job and this code is approved, whatever the settings of its rounds. None if it may.
        """
        self.permit = None
        try:
            if self._orders is not None:
                self.permit = self._orders.permit_evaluation(command)
        except BadOrder as error:
            return Refusal(error.reason, str(error))
        if self._approval.mode == "off":
            return None
        free = self._approval.free
        job = {key: value for key, value in job_facts(command.job).items() if key not in free}
        # Compared as text, as a card's name is: for Python, true equals 1.
        wanted = Card({"job": job, "free": sorted(free), **self._site}, {})
        try:
            cards, _ = self._cards.all()
        except OSError as error:
            return Refusal(NOT_APPROVED, f"the cards of this site cannot be read: {error}")
        told = [Card({key: kept.card.facts.get(key) for key in wanted.facts}, {}).text for kept in cards]
        alike = [kept for kept, text in zip(cards, told, strict=True) if text == wanted.text]
        if self._code.changed() or all(kept.refusal(time.time()) for kept in alike):
            return Refusal(NOT_APPROVED, "this site has approved no card of this job")
        return None

    def follow(self) -> dict[str, str]:
        """Note durably that the newest command is followed.

        Returns:
            Who has signed its job, and which signed job that is, for the site's log.

        Raises:
            OSError: If that is impossible. Then the command must not be followed.
        """
        if self._orders is None or self.permit is None:
            return {}
        self._orders.follow(self.permit)
        return {"operator": self.permit.operator, "order": self.permit.nonce}

    def waiting(self, session: pb.JoinReply, refused: int = 0) -> list[int]:
        """Return the jobs that wait for an approval at this site.

        They are those of one server's state: another one may have other jobs with the same ids.

        Args:
            session: As the server has opened it.
            refused: A job whose refusal the server is being told: it has waited then, whatever was decided since.
        """
        found, waiting = [], list(self._waiting.items())
        edited = any(card is None for _, card in waiting) and self._code.changed()  # one look at all files is enough
        for (run_id, epoch, job_id), card in waiting:
            if run_id != session.run_id or (session.HasField("epoch") and session.epoch != epoch):
                continue
            if job_id == refused or (self._refusal(card) if card else edited):
                found.append(job_id)
        return found

    def _note(self, command: pb.TrainCmd, card: Card) -> str:
        """Return why a command's card is not approved; its job waits then."""
        if why := self._refusal(card):
            self._wait(command, card, f"{why}; show it with: fl-client cards list")
        elif self._waiting.pop(_job_of(command), None):
            self._keep()
        return why

    def _wait(self, command: pb.TrainCmd, card: Card | None, why: str) -> None:
        log.warning("job %d waits: %s", command.job.job_id, why)
        # At once: a heartbeat that named the job no more would say that it is approved.
        self._waiting[_job_of(command)] = card
        for other in list(self._waiting)[:-_MOST_WAITING]:
            self._waiting.pop(other, None)
        self._keep()

    def _keep(self) -> None:
        """Write down which jobs wait.

        Otherwise, all other sites would train once more for each restart of a site that has not decided.
        """
        rows = [[*job, card.name] for job, card in self._waiting.items() if card and len(job[0]) <= _LONGEST_RUN]
        try:
            replace_with_digest(self._path, json.dumps(rows).encode())
        except OSError as error:
            log.warning("%s cannot be written, so a restart forgets which jobs wait: %s", self._path, error)

    def _kept(self) -> dict[_Job, Card]:
        """Return the jobs that waited when this client ended.

        The server asks for others again: without that, nobody here could see their cards of the code of now.
        """
        try:
            told = parse_json(text_after_digest(self._path.read_bytes()))
            rows = [(str(run), int(epoch), int(job), str(name)) for run, epoch, job, name in told]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read, so the server asks for these jobs again: %s", self._path, error)
            return {}
        ours, waiting = {"free": sorted(self._approval.free), **self._site}, {}
        for run_id, epoch, job_id, name in rows:
            with suppress(CardError, OSError):  # it was dropped, or is damaged
                card = self._cards.named(name).card
                if Card({key: card.facts.get(key) for key in ours}, {}).text == Card(ours, {}).text:
                    waiting[run_id, epoch, job_id] = card
        return waiting

    def _refusal(self, card: Card) -> str:
        try:
            if len(card.text) > MAX_CARD_BYTES:
                return f"its card has {len(card.text)} bytes, above {MAX_CARD_BYTES}"
            return self._cards.find(card).refusal(time.time())
        except (CardError, OSError, ValueError) as error:
            return f"its card cannot be made or read here: {error}"


def _job_of(command: pb.TrainCmd) -> _Job:
    return command.run_id, command.epoch, command.job.job_id
