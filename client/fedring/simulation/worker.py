"""A worker of a simulation, which trains one client after the other.

It holds the model and the samples of one job.

For each client it does what fl-client does between a command and an upload, and what fl-server does before it accepts
the update, with their functions.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from safetensors.torch import load as load_tensors

from fedring.client.client_round import Answer, ClientRound
from fedring.client.config import ClientConfig
from fedring.client.errors import UpdateRefused
from fedring.client.loading import add_left_out
from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import is_covered
from fedring.client.policy.secret import ClientSecret
from fedring.client.round_plan import plan_of, seed_of, unseeded_plan
from fedring.client.training.job_loading import load_job
from fedring.client.training.local_training import LoadedJob, LocalTraining, loop_of
from fedring.client.training.personal import figures_of
from fedring.client.transfer.own_values import PERSONAL, line_of, section_of, values_in
from fedring.client.transfer.residual import residual_in
from fedring.client.transfer.sample_charge import cost_of
from fedring.client.transfer.update import TrainingReport, Update
from fedring.client.transforms.chosen import begin_transforms
from fedring.client.transforms.interface import RoundStart
from fedring.codec import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.data import ClientPart, DataError
from fedring.job_code import job_code
from fedring.privacy.account import NoAccountant, SampledSteps, sampled_epsilon
from fedring.rpc.errors import BadRequest, FedringError
from fedring.server.aggregation.terms import Terms
from fedring.server.aggregation.walk import cut
from fedring.server.model.transforms.listing import Transforms, transforms_of
from fedring.server.state.rows import UpdateRow
from fedring.server.update.admission import (
    Admission,
    DecodedOffer,
    check_offer,
    check_payload,
    check_sender,
    row_of,
)
from fedring.simulation.batching import Batched, batched_or_not
from fedring.simulation.cohort import CohortMember, Trained
from fedring.simulation.groups import protection_of
from fedring.simulation.plain_updates import SharedForm
from fedring.simulation.samples import ClientSamples, OwnParts, Setup, Shares, client_id
from fedring.simulation.secret import client_secret
from fedring.simulation.vectors import Packed, Vector, pack, unpack
from fedring.train.batches import size_of
from fedring.train.device import pick_device
from fedring.train.errors import SeamError, TrainError, failure_detail, failure_reason
from fedring.train.evaluation import Counts, run_evaluator
from fedring.train.loop import seeded, warm_up
from fedring.train.orders.commands import job_spec
from fedring.train.plan import Plan, TrainResult
from fedring.train.tensors.download import HeldModel
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import SharedTensors, frozen_digest, has_frozen, read_tensors, write_tensors
from fedring.train.tensors.state import split as split_tensors
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_POLICY = SitePolicy.model_validate({})  # of each client: none


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A round, for a worker that trains clients in it."""

    command: bytes  # a serialized TrainCmd
    vectors: Vectors  # the model that the round starts from
    clients: int  # that are drawn
    control: Vector | None = None  # the server's control variate; None = all of it is zero, or none


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A client to train."""

    client: int  # its number, from 0
    kept: Mapping[str, Packed]  # what its newest accepted update has left
    spent: Sequence[SampledSteps] = ()  # what its samples have spent
    peers: int = 0  # clients of its group of updates that are added up, with itself; 0 = there is none
    samples: int = 0  # that its last update counted for; 0 = there was none
    command: bytes = b""  # the client's own, if overrides hold for it; empty = that of the round

    @property
    def is_plain(self) -> bool:
        """Whether nothing is the client's own but its samples."""
        return not (self.command or self.peers or self.kept)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of a client's turn."""

    client: int
    update: UpdateRow | None  # with its payload; None if there is none
    samples: int = 0  # that the update counts for; 0 = it changes nothing, because the training has failed
    kept: Mapping[str, Packed] = field(default_factory=dict)  # what the update leaves
    failure: str = ""  # why there is no update, or one that changes nothing, as one sentence
    spent: SampledSteps | None = None  # what the training has spent; None = the job has no [sample_dp]
    delta: Vector | None = None  # of the parameters, if the row lacks it (plain_updates)


class SampleAccounts:
    """The accounts of all clients' samples, all in one job."""

    def __init__(self) -> None:
        self._spent: dict[int, list[SampledSteps]] = {}

    def charge(self, outcome: Outcome) -> None:
        """Charge a training, also if its update does not count."""
        if outcome.spent is not None:
            self._spent.setdefault(outcome.client, []).append(outcome.spent)

    def of(self, client: int) -> Sequence[SampledSteps]:
        """Return the steps that a client's samples have spent."""
        return self._spent.get(client, ())

    def epsilon(self, delta: float) -> float | None:
        """Return the largest epsilon of a client's samples.

        It is None if dp-accounting is not installed.
        """
        with suppress(NoAccountant):
            return max((sampled_epsilon(spent, delta) for spent in self._spent.values()), default=0.0)
        return None


@dataclass(frozen=True, slots=True)
class _TurnAccount:
    """The account of one client's samples, all in one job."""

    spent: Sequence[SampledSteps]

    def sample_epsilon(self, delta: float, *, of: pb.TrainCmd | None = None, more: SampledSteps | None = None) -> float:
        """See `fedring.client.policy.ledger.Ledger`."""
        return sampled_epsilon([*self.spent, *([more] if more else [])], delta)


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A client whose own model is to be evaluated."""

    client: int
    model: bytes  # as a safetensors file


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A client with a round of its own, for a cohort."""

    turn: Turn
    plan: Plan
    round: ClientRound
    member: CohortMember
    together: Batched  # with which it is trained


class WorkerModel:
    """The model of a worker, which its clients train in turn.

    Args:
        loaded: The job, with the model.
        sharing: Says which of its tensors travel.

    Attributes:
        schema: The shared tensors.
        not_frozen: Those that training may change.
    """

    def __init__(self, loaded: LoadedJob, sharing: Sharing) -> None:
        self._loaded, self._sharing = loaded, sharing
        tensors = split_tensors(loaded.model, sharing)
        self.schema, self.not_frozen = tensors.shared, tensors.not_frozen
        self._frozen_schema = tensors.frozen
        self._frozen_digest = frozen_digest(loaded.model, tensors.frozen)
        self._frozen = read_tensors(loaded.model, tensors.frozen.names)
        self._shared = SharedTensors(loaded.model, self.schema)

    def put_frozen_back(self) -> None:
        """Give the frozen tensors the values that they were loaded with."""
        if self._frozen:  # a client's trainer may have changed them
            write_tensors(self._loaded.model, self._frozen)

    def tensors(self) -> SharedTensors:
        """Return the model's shared tensors.

        They are found anew if code of the user's may have done anything to the model.
        """
        if self._loaded.trainer is not None or self._loaded.evaluator is not None:
            self._shared = SharedTensors(self._loaded.model, self.schema)
        return self._shared

    def check(self) -> None:
        """Check that training has changed values only, and no frozen ones.

        Raises:
            UpdateRefused: It has other tensors, or other values of the frozen ones.
        """
        if clause := self.schema.difference(split_tensors(self._loaded.model, self._sharing).shared):
            raise UpdateRefused("wrong_schema", f"this model is not the one that was loaded: {clause}")
        if not has_frozen(self._loaded.model, self._frozen_schema, self._frozen_digest):
            raise UpdateRefused("frozen_changed", "the trainer has changed the values of frozen tensors")


class RoundTerms:
    """A round's demands on updates.

    Args:
        schema: The tensors of an update.
        transforms: Those of the job.
    """

    def __init__(self, schema: Schema, transforms: Transforms) -> None:
        self._schema, self._transforms = schema, transforms
        self._known = dict[int, Terms]()

    def of(self, command: pb.TrainCmd, peers: int) -> Terms:
        """Return the demands on updates.

        Args:
            command: Of the round.
            peers: Clients of the group that an update belongs to; 0 = there is none.
        """
        if (terms := self._known.get(peers)) is None:
            first = Terms(command.model_digest, command.max_update_bytes, self._schema)
            terms = self._known[peers] = self._transforms.terms(first, command, peers)
        return terms

    def admit(self, client: str, update: Update, command: pb.TrainCmd, peers: int) -> UpdateRow:
        """Return the row of a client's update: see the function `admit`."""
        terms = self.of(command, peers)
        payload, digest = b"".join(update.parts), update.offer.payload_digest
        # What was made here need not be decoded, and was digested a moment ago.
        offer = DecodedOffer(update.header, digest, update.offer.name)
        return admit(client, offer, payload, terms, epoch=command.epoch)


class SimulationWorker:
    """Trains and evaluates for a simulation.

    Attributes:
        sizes: The number of training samples of each client.
        why_exact: Why clients are trained one by one, as a sentence; empty, if they are not, or nothing else was asked.

    Raises:
        SeamError: If a name in the job cannot be resolved, or the model cannot be built.
        DataError: If the samples cannot be loaded or divided.
    """

    def __init__(self, setup: Setup) -> None:
        self._device, self._secret = pick_device(setup.device), setup.secret
        job, spec = setup.job, job_spec(setup.job, 1)
        config = ClientConfig.model_construct(data_root=setup.data_root)  # which does not read the environment
        offered = setup.offered()

        def load() -> LoadedJob:
            with seeded(job.seed, self._device):  # so that a data callable that draws samples draws the same everywhere
                return load_job(spec, config, offered, self._device, ClientPart(0, setup.clients, client_id(0)))

        self._loaded = load()
        loop_of(spec).check(self._loaded, self._loaded.split.train, self._device)
        warm_up(self._device)
        data = offered.get("data", job.data)
        self._samples: ClientSamples = (
            OwnParts(data, setup, self._device) if self._loaded.divided else Shares(self._loaded.split, setup)
        )
        self.sizes = self._samples.sizes
        self._transforms = transforms_of(job)
        self._loaded, self._batched, self.why_exact = batched_or_not(
            self._loaded, self._samples, setup, self._device, load
        )
        self._model = WorkerModel(self._loaded, job.sharing)
        self._schema = self._model.schema
        self._command = self._told_to_all = pb.TrainCmd()
        self._terms = RoundTerms(self._schema, self._transforms)
        self._base: HeldModel | None = None
        self._form: SharedForm | None = None  # of the updates of the round that has begun

    def begin(self, order: Order) -> None:
        """Take the model and the command of the next round."""
        self._command = self._told_to_all = pb.TrainCmd.FromString(order.command)
        self._terms = RoundTerms(self._schema, self._transforms)
        self._base = HeldModel(self._command.model_digest, self._schema, order.vectors)
        if self._batched is not None:
            self._start, self._from = self._batched.values_of(self._loaded.model, self._schema, order.vectors)
        self._control = np.zeros(self._schema.num_parameters, np.float32) if order.control is None else order.control
        # The figures of a user's trainer are checked one by one.
        plain, terms_of = self._loaded.trainer is None, partial(self._terms.of, self._command)
        self._form = SharedForm.of(self._command, order.vectors, terms_of) if plain else None

    def train(self, turns: Sequence[Turn]) -> list[Outcome]:
        """Train clients in the round that has begun.

        An error is the failure of its client alone.
        """
        if (together := self._batched) is None:
            return [self._turn(turn) for turn in turns]
        # Clients with about as many samples come together, so that little is padded.
        ordered = sorted(turns, key=lambda turn: self.sizes[turn.client])
        chunks = [ordered[low:high] for low, high in cut(0, len(ordered), together.most)]
        return [outcome for chunk in chunks for outcome in self._train_together(chunk, together)]

    def _train_together(self, turns: Sequence[Turn], together: Batched) -> list[Outcome]:
        """Train clients as one computation.

        Whatever goes wrong with it concerns one of them: then each is trained alone, which finds out whose fault it is.
        """
        self._fill()
        alike, others = list[Turn](), list[Turn]()
        for turn in turns:
            (alike if self._form is not None and turn.is_plain else others).append(turn)
        outcomes = [*self._train_alike(alike, together), *self._train_others(others, together)]
        done = {outcome.client for outcome in outcomes}
        return outcomes + [self._turn(turn) for turn in turns if turn.client not in done]

    def _train_alike(self, turns: Sequence[Turn], together: Batched) -> list[Outcome]:
        """Return the outcomes of clients whose updates have the shared form.

        Those that fail are left out.
        """
        self._command = command = self._told_to_all
        members, outcomes = dict[Turn, CohortMember](), list[Outcome | None]()
        for turn in turns:
            name = client_id(turn.client)
            try:
                samples = self._samples.train(turn.client)
            except Exception:  # the user's data may raise anything
                log.debug("%s cannot begin round %d", name, command.round, exc_info=True)
            else:
                members[turn] = CohortMember(samples, seed_of(command, name, self._secret_of(name)), self._start)
        still = np.zeros(self._schema.num_parameters, np.float32)
        found = together.train(unseeded_plan(command), [*members.values()], self._from, round_=command.round)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused, and told
            for turn, trained in zip(members, found, strict=True):
                if trained is not None:
                    delta = together.among_all(self._schema, trained.values, still)
                    outcomes.append(self._shared_outcome(turn, delta, trained.result))
        return [outcome for outcome in outcomes if outcome is not None]

    def _train_others(self, turns: Sequence[Turn], together: Batched) -> Iterator[Outcome]:
        """Yield the outcomes of clients that begin rounds of their own.

        Those with the same plan are trained together. Those that fail are left out.
        """
        groups = dict[Plan, list[_Begun]]()
        for turn in turns:
            self._hear(turn)
            try:
                plan, round_ = self._plan(turn), self._begin(turn)
                start = self._start
                if round_.start is not self._base:
                    start, _ = together.values_of(self._loaded.model, self._schema, round_.start.vectors)
                used = round_.plan(plan)
                member = CohortMember(self._samples.train(turn.client), used.seed, start, round_.corrections())
            except Exception:  # the client's half of an algorithm may raise anything
                log.debug("%s cannot begin round %d", client_id(turn.client), self._command.round, exc_info=True)
            else:
                groups.setdefault(replace(used, seed=0), []).append(_Begun(turn, plan, round_, member, together))
        for used, begun in groups.items():
            found = together.train(used, [each.member for each in begun], round_=self._command.round)
            for each, trained in zip(begun, found, strict=True):
                if trained is not None:
                    yield self._turn(each.turn, each, trained)

    def _shared_outcome(self, turn: Turn, delta: Vector, result: TrainResult) -> Outcome | None:
        """Return the outcome of a client whose update has the shared form.

        None = the server would refuse the update.

        Args:
            turn: Of the client.
            delta: The difference of its parameters to the base's.
            result: Of its training.
        """
        row = self._form.row(client_id(turn.client), delta, result) if self._form else None
        return None if row is None else Outcome(turn.client, row, result.num_samples, delta=delta)

    def evaluate(self, vectors: Vectors) -> Counts:
        """Evaluate a model on this worker's share of the test samples.

        Raises:
            Exception: Whatever the user's evaluator or loss raises.
        """
        loaded, counts = self._loaded, Counts()
        for samples in self._samples.held_out():
            if not size_of(samples):
                continue
            self._model.put_frozen_back()
            self._model.tensors().fill(vectors)
            counts += run_evaluator(loaded.evaluator, loaded.model, samples, loss=loaded.loss, device=self._device)
        return counts

    def evaluate_own(self, own: Own) -> tuple[Counts, dict[str, float]]:
        """Evaluate a client's own model on its test samples.

        Returns the counts, and the figures to report.

        Raises:
            Exception: Whatever the user's evaluator or loss raises.
        """
        loaded, samples = self._loaded, self._samples.test(own.client)
        self._model.put_frozen_back()
        write_tensors(loaded.model, load_tensors(own.model))
        counts = run_evaluator(loaded.evaluator, loaded.model, samples, loss=loaded.loss, device=self._device)
        return counts, figures_of(counts)

    def _hear(self, turn: Turn) -> None:
        """Take the command of a client, which may be its own."""
        self._command = pb.TrainCmd.FromString(turn.command) if turn.command else self._told_to_all

    def _turn(self, turn: Turn, begun: _Begun | None = None, trained: Trained | None = None) -> Outcome:
        """Train a client, unless others were trained with it.

        Then make its update.
        """
        account = _TurnAccount(turn.spent)
        self._hear(turn)
        try:
            plan, size = self._plan(turn) if begun is None else begun.plan, self.sizes[turn.client]
            spent = cost_of(self._command, plan, size, policy=_POLICY, account=account)
        except TrainError as error:
            return Outcome(turn.client, None, failure=f"{client_id(turn.client)}: {error}")
        name, answer, samples, reason, failure = client_id(turn.client), None, 0, "", ""
        try:
            with job_code():
                if begun is not None and trained is not None:
                    answer, samples = self._update_of(begun, trained)
                elif (plain := self._plain(turn, plan)) is not None:
                    return plain
                else:
                    answer, samples = self._update(turn, plan)
        except (SeamError, TrainError, DataError, CodecError, UpdateRefused) as error:
            reason, failure = error.reason, str(error)
        except Exception as error:  # the user's code may raise anything
            log.debug("%s failed in round %d", name, self._command.round, exc_info=True)
            reason, failure = failure_reason(error), failure_detail(error)
        failure = f"{name}: {failure}" if failure else ""
        if answer is None and not is_covered(self._command):
            return Outcome(turn.client, None, failure=failure)
        try:
            answer = answer or self._nothing(turn, plan, reason)
            row = self._terms.admit(client_id(turn.client), answer.update, self._command, turn.peers)
        except (CodecError, FedringError, UpdateRefused) as error:
            return Outcome(turn.client, None, failure=f"{name}: {error}")
        except Exception as error:  # such as a lack of memory
            log.debug("%s sends nothing in round %d", name, self._command.round, exc_info=True)
            return Outcome(turn.client, None, failure=f"{name}: {failure_detail(error)}")
        return Outcome(turn.client, row, samples, pack(answer.kept, self._schema.num_parameters), failure, spent)

    def _update_of(self, begun: _Begun, trained: Trained) -> tuple[Answer, int]:
        """Make the update of a client of a cohort: see `_update`."""
        result, base = trained.result, begun.round.start.vectors
        report = TrainingReport(result.num_samples, result.seconds, result.metrics)
        values = Vectors(begun.together.among_all(self._schema, trained.values, base.parameters), base.buffers)
        return begun.round.trained(values, report), result.num_samples

    def _plain(self, turn: Turn, plan: Plan) -> Outcome | None:
        """Train a client whose update has the shared form.

        None = it has not, or the server would refuse the update. Then `_update` does the same and says why.
        """
        # The buffers of a form are those of the base, which a training by itself may change.
        if self._form is None or self._form.packets or self._base is None or not turn.is_plain:
            return None
        self._fill()
        result = self._training(turn).train(plan, None)
        delta = self._model.tensors().read().parameters
        with np.errstate(over="ignore", invalid="ignore"):
            delta -= self._base.vectors.parameters
            return self._shared_outcome(turn, delta, result)

    def _nothing(self, turn: Turn, plan: Plan, reason: str) -> Answer:
        """Make the update that fl-client sends instead of a failure."""
        self._fill()
        round_ = self._begin(turn)
        training = self._training(turn)
        samples = training.counted(self.sizes[turn.client], turn.samples)
        trained = training.train_on_noise(round_.plan(plan), reason, lambda: None)
        return round_.nothing(self._model.tensors().read() if trained else None, samples)

    def _training(self, turn: Turn) -> LocalTraining:
        return LocalTraining(self._command, self._loaded, self._samples.train(turn.client), self._device)

    def _fill(self) -> None:
        """Give the model the values of the round's base."""
        if self._base is None:
            raise ValueError("no round has begun")
        self._model.tensors().fill(self._base.vectors)
        self._model.put_frozen_back()

    def _begin(self, turn: Turn) -> ClientRound:
        """Begin the round of a client, whose model has the base's values.

        The model gets the values that the client's training begins with.
        """
        if self._base is None:
            raise ValueError("no round has begun")
        command, base, name = self._command, self._base, client_id(turn.client)
        protection = protection_of(command, name, self._secret_of(name), turn.peers)
        kept = unpack(turn.kept)
        schema, nothing = protection.residual_schema(command.schema_hash), pb.LastAccepted()
        residual, _ = residual_in(kept, command.run_id, schema, nothing)  # the server has what the clients know of
        start = base
        if protection.trains_on_residual and residual is not None:
            start = add_left_out(self._loaded.model, base, residual)
        transforms = begin_transforms(RoundStart(command, base, lambda digest: self._control), kept)
        return ClientRound(command, name, start, kept, residual, tuple(transforms), protection)

    def _plan(self, turn: Turn) -> Plan:
        name = client_id(turn.client)
        return plan_of(self._command, name, self._secret_of(name))

    def _secret_of(self, name: str) -> ClientSecret:
        return ClientSecret(lambda: client_secret(self._secret, name))

    def _update(self, turn: Turn, plan: Plan) -> tuple[Answer, int]:
        """Train and make an update, as fl-client does.

        Returns the update, and the number of samples.
        """
        training, not_frozen = self._training(turn), self._model.not_frozen
        self._fill()
        round_ = self._begin(turn)
        kept, line = round_.kept, line_of(self._command)
        own = training.train_own(plan, not_frozen, lambda: values_in(kept, PERSONAL, line, not_frozen))
        result = training.train(round_.plan(plan), round_.corrections())
        # The user's own trainer may have done anything to the model, so check before values leave it.
        if self._loaded.trainer:
            self._model.check()
        report = TrainingReport(result.num_samples, result.seconds, result.metrics)
        answer = round_.trained(self._model.tensors().read(), report)
        if own:
            mine = {PERSONAL: section_of(line, not_frozen, own)}
            answer = replace(answer, kept={**answer.kept, **mine})
        return answer, result.num_samples


def admit(client: str, offer: DecodedOffer, payload: bytes, terms: Terms, *, epoch: int) -> UpdateRow:
    """Return the row of an update that the server would accept.

    The row comes with the update's payload.

    Args:
        client: The id of the client that offers the update.
        offer: The client's offer. Its digest must be that of the payload.
        payload: The bytes of the update.
        terms: The terms of the round.
        epoch: Of the server.

    Raises:
        FedringError, CodecError: The server would refuse the update.
    """
    check_sender(offer.header, client)
    packets = check_offer(offer.header, terms)
    if len(payload) != offer.header.total_bytes:
        raise BadRequest(f"{len(payload)} bytes, not the declared {offer.header.total_bytes}", reason="bad_chunk")
    view = memoryview(payload)
    norm = check_payload(lambda at, size: view[at : at + size], packets, terms.schema, terms.bare, terms.opaque)
    return row_of(offer, terms, Admission(packets, norm, time.time()), payload, epoch=epoch)


def limit_threads(threads: int) -> None:
    """Let torch compute with so many threads in this process."""
    torch.set_num_threads(threads)
