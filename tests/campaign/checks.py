"""The promises of docs/reliability.md, checked from outside; each check yields a sentence for each thing that is wrong.

Sentences begin with the promise (P1 to P7). Nothing here uses the product to compute what the product should have
computed, except its decoders of payloads, and the simulation that is the undisturbed twin.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from fedring.codec.digest import is_called, name_of
from tests.campaign.evidence import Evidence
from tests.campaign.lessons import SIZE, common_of, lesson_of, samples_of, trained_rounds
from tests.damage import ask
from tests.fault.residuals import check_rounds
from tests.kept import kept_of, kept_residual, kept_residuals
from tests.ledgers import account_in

_DROPPED = re.compile(r"dropped the residual of past updates: an update of round (\d+) was accepted")
_DAMAGED = re.compile(r"dropped \S+/kept-\S+, and nothing is left of past updates.*?round (\d+)", re.DOTALL)
_OF_THE_DISK = re.compile(r"Traceback[^\n]*OSError: \[Errno (?:5|28)\] [^\n]*")  # a line of the log, which is JSON
_SLACK = 12.0  # seconds, for a busy machine, and for the clients of a server that has restarted

CUT_SHORT = re.compile(  # gRPC's word for a call that came while the server ended
    r"Traceback [^\n]*?(?:\\n|\n)[^\n]*?_schedule_rpc_coro(?:\\n|\n)asyncio\.exceptions\.CancelledError"
)
_CLOSED_TOGETHER = re.compile(r'"an error occurred during closing of asynchronous generator [^\n]*')
"""asyncio's word for calls that are still under way when a server ends at once, since its disk cannot be trusted."""
_OF_ITS_JOB = ("stopped", "job_ended")
"""Reasons of a round whose job was stopped; the second one, if a server that has just started had not opened it yet."""
_DISK_HARMS = ("full disk", "failing disk", "failing syncs")

Check = Callable[[Evidence, Counter[str]], Iterable[str]]
"""Yields what is wrong, and counts what it has compared."""

_BLOBS = ("blob", "delta_blob", "residual_blob", "optimizer_blob", "control_blob", "spread_blob", "transforms_blob")


def everywhere(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """Check what holds for every kind of job."""
    for check in (storage_is_sound, updates_count_once, told_is_kept, rounds_ended, logs_are_quiet):
        yield from check(evidence, counts)


def storage_is_sound(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P2: the database is whole, each blob that it names is there with its digest, and no other."""
    state = evidence.state
    if (found := ask(state, "PRAGMA integrity_check")) != [("ok",)]:
        yield f"P2: the database is damaged: {found[:1]}"
    columns = [f"SELECT {column} FROM models" for column in _BLOBS]
    named = {str(name) for (name,) in ask(state, " UNION ".join(["SELECT blob FROM updates", *columns])) if name}
    files = {path.name: path for path in (state / "blobs").iterdir() if path.name != "state_id"}
    for name in sorted(named - files.keys() - evidence.originals.keys()):
        yield f"P2: the blob {name} is missing"
    for name in sorted(files.keys() - named):
        yield f"P2: no row names the blob {name}"
    for name in sorted(named & files.keys()):
        counts["blobs"] += 1
        if name not in evidence.originals and not is_called(files[name].read_bytes(), name):
            yield f"P2: the blob {name} is damaged"
    for update in evidence.updates:
        if name_of(update.payload) != update.digest:
            yield f"P2: the update of {update.client} in round {update.round} is damaged"


def updates_count_once(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P1: no update is in two rounds, or twice in one."""
    counts["accepted"] += sum(evidence.accepted_of(client) for client in range(len(evidence.folders)))
    jobs = {round_.round: round_.job_id for round_ in evidence.rounds}
    for words, keys in (
        ("name", [update.name for update in evidence.updates]),
        ("place", [(update.round, update.client) for update in evidence.updates]),
        ("buffer", [(update.buffer, update.client) for update in evidence.updates]),
        ("payload", [(jobs.get(update.round), update.client, update.digest) for update in evidence.updates]),
    ):
        for key, times in Counter(keys).items():
            if times > 1:
                counts["doubled"] += 1
                yield f"P1: {times} accepted updates have the {words} {key}"


def told_is_kept(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P2: an update of which its client was told that it is accepted is in the database, or counted there."""
    if evidence.originals:  # what the disk has damaged is left out
        return
    oldest = min((update.round for update in evidence.updates), default=0)
    pruning = bool(ask(evidence.state, "SELECT 1 FROM clients WHERE pruned_updates > 0"))
    kept = {
        (update.round, update.client_index)
        for state in (evidence.state, *evidence.lost)
        for update in (evidence.updates if state == evidence.state else evidence.updates_of(state))
    }
    for client in range(len(evidence.folders)):
        for number in evidence.told(client):
            counts["told"] += 1
            if (number, client) not in kept and not (pruning and number < oldest):
                counts["lost"] += 1
                yield f"P2: client-{client} was told that its update of round {number} is accepted, and it is gone"


def rounds_ended(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P3: each round was published as one model, or abandoned with a reason, and none by a fault of the server."""
    last = {round_.job_id: round_.round for round_ in evidence.rounds}  # of each job
    for round_ in evidence.rounds:
        counts["rounds"] += 1
        if not round_.ended or round_.phase not in ("published", "abandoned"):
            yield f"P3: round {round_.round} has not ended; it is {round_.phase}"
        elif (round_.phase == "published") != bool(round_.model):
            yield f"P3: round {round_.round} is {round_.phase} with the model {round_.model}"
        elif round_.phase == "abandoned" and not round_.reason:
            yield f"P3: round {round_.round} is abandoned without a reason"
        elif round_.phase == "abandoned" and round_.reason in ("internal", "damaged_blob", "damaged_row"):
            yield f"P3: round {round_.round} is abandoned: {round_.reason}"
        elif round_.reason in _OF_ITS_JOB and round_.round != last[round_.job_id]:
            yield f"P3: round {round_.round} is abandoned: {round_.reason}, and it was not the last of its job"
    for job_id in last:
        for one, other in pairwise(each for each in evidence.rounds if each.model and each.job_id == job_id):
            if other.base != one.model or other.model <= one.model:
                yield f"P5: round {other.round} goes from model {other.base} to {other.model}, after model {one.model}"


def logs_are_quiet(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """Yield each daemon in which an error was not foreseen."""
    for name, text in evidence.logs.items():
        if any(evidence.done.get(f"{harm} of {name}") for harm in _DISK_HARMS):
            # A client tells its operator why it has told the server disk_failed.
            text = CUT_SHORT.sub("", _CLOSED_TOGETHER.sub("", text)) if name == "server" else _OF_THE_DISK.sub("", text)
        if "Traceback" in text:
            yield f"P4: {name} logged an error that nobody foresaw: {text[text.index('Traceback') :][:800]}"


def no_client_is_refused(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P3: a client that returns gets its session back at once, also if the server takes the old one for alive."""
    for name, text in evidence.logs.items():
        if name != "server" and "has another session of" in text:
            yield f"P3: {name} was refused, because the server took it for another client"


def deltas_are_lessons(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P5: each accepted update is what its client has learned, and counts for its samples."""
    for update in evidence.updates:
        if update.samples != samples_of(update.client_index, update.round):
            yield f"P5: the update of {update.client} in round {update.round} counts for {update.samples} samples"
        if _far(update.values, lesson_of(update.client_index, update.round)):
            yield f"P5: the update of {update.client} in round {update.round} is not its lesson"


def deltas_are_values(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P5: each accepted update is what its client has learned from the command that it answers."""
    for update in evidence.updates:
        if _far(update.values, lesson_of(update.client_index, update.round)):
            yield f"P5: the update of {update.client} in round {update.round} is not its lesson"


def models_are_means(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P5: each model is the one before it plus the weighted mean of its accepted updates, byte for byte."""
    for round_ in evidence.rounds:
        if not round_.model:
            continue
        updates = evidence.by_round.get(round_.round, [])
        if not updates:
            yield f"P5: round {round_.round} has published model {round_.model} of no updates"
            continue
        base = evidence.values_of(round_.base)
        total, samples = np.zeros(len(base), np.float64), 0
        for update in updates:
            weight = 1 if evidence.job.get("weights") == "uniform" else update.samples
            total += weight * update.decoded(len(base)).astype(np.float64)
            samples += weight
        expected = (base + total / samples).astype(np.float32)
        stored = evidence.values_of(round_.model)
        counts["models"] += 1
        if stored.tobytes() != expected.tobytes():
            difference = float(np.abs(stored - expected).max())
            yield f"P5: model {round_.model} is not the mean of its updates; they differ by {difference:g}"
        if name_of(stored.tobytes()) != evidence.models[round_.model][0]:
            yield f"P5: model {round_.model} has another digest than its row says"


def models_are_buffers(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P5: each version is the one before it plus a full buffer, in which old updates count less, byte for byte."""
    table = evidence.job["asynchronous"]
    started = {round_.round: round_.base for round_ in evidence.rounds}
    for round_ in evidence.rounds:
        if not round_.model:
            continue
        updates = evidence.by_round.get(round_.round, [])
        versions = [each.model for each in evidence.rounds if each.job_id == round_.job_id and each.model]
        if not 0 < len(updates) <= table["buffer"]:
            yield f"P5: model {round_.model} is made of {len(updates)} updates"
        base, total = evidence.values_of(round_.base), np.zeros(SIZE, np.float64)
        for update in updates:
            old = sum(started[update.round] < version <= round_.base for version in versions)
            if old != update.staleness or old > table["max_staleness"]:
                yield f"P5: {update.client} in model {round_.model} is {old} versions old, and not {update.staleness}"
            counts["late"] += old > 0
            total += update.values.astype(np.float64) * (1.0 / math.sqrt(1.0 + old))
        counts["models"] += 1
        if evidence.values_of(round_.model).tobytes() != (base + total / table["buffer"]).astype("<f4").tobytes():
            yield f"P5: model {round_.model} is not what its buffer makes"


def mass_is_conserved(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P6: all that a client has sent, and what it still owes, is the sum of the lessons that were accepted."""
    for client, folder in enumerate(evidence.folders):
        log = evidence.logs[f"client-{client}"]
        dropped = [int(number) for number in _DROPPED.findall(log)]
        dropped += [int(number) - 1 for number in _DAMAGED.findall(log)]  # the next round begins with nothing owed
        if dropped and client not in evidence.reverted:
            yield f"P6: client-{client} has dropped its residual, and nobody had touched its folder"
        begun = max(dropped, default=0)  # with a folder of before, it begins anew after the newest accepted update
        mine = [update for update in evidence.updates if update.client_index == client and update.round > begun]
        total = np.zeros(SIZE, np.float64)
        for left in kept_residuals(folder):  # one of each line of models
            total += left
        for update in mine:
            total += update.values.astype(np.float64) - lesson_of(client, update.round)
        counts["residuals"] += 1
        if _far(total, np.zeros(SIZE), scale=max(1, len(mine))):
            wrong = int((np.abs(total) > 1).sum())
            yield f"P6: client-{client} has lost or doubled what it learned, in {wrong} of {SIZE} values"


def older_residuals_are_dropped(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P6: a client does not go on with an older residual, though the server has no row of its newest update."""
    for client, times in Counter(evidence.must_drop).items():
        counts["residuals"] += times
        found = len(_DROPPED.findall(evidence.logs[f"client-{client}"]))
        if found < times:
            yield f"P6: client-{client} went {times} times back to an older residual, and has dropped {found}"


def roundings_differ(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P4: each client rounds by a dither of its own, or a sum of the same updates would show them."""
    first = next((round_ for round_ in evidence.rounds if round_.model), None)
    if first is None:
        return
    moved = evidence.values_of(first.model) - evidence.values_of(first.base)
    counts["models"] += 1
    runs = [np.unique(moved[start : start + 16]) for start in range(0, SIZE - 16, 16)]  # no block is shorter
    if all(len(run) <= 2 for run in runs):  # all clients have rounded each value to the same side
        yield f"P4: in round {first.round}, no client has rounded otherwise than the others"


def sums_conserve_mass(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P6: all sums, and what the clients still owe, are what they have learned in the rounds that were published."""
    total = np.zeros(SIZE, np.float64)
    for round_ in evidence.rounds:
        if round_.model:
            total += len(evidence.folders) * (
                evidence.values_of(round_.model) - evidence.values_of(round_.base) - common_of(round_.round)
            )
    for folder in evidence.folders:
        left = kept_residual(folder)
        total += 0 if left is None else left
        counts["residuals"] += 1
    if (wrong := np.abs(total) > 0.001).any():  # a lesson of one client is 0.00377 or more
        yield f"P6: the clients have lost or doubled what they learned, in {int(wrong.sum())} of {SIZE} values"


def own_tensors_count_rounds(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P1: a private tensor has been trained once for each accepted update."""
    for client, folder in enumerate(evidence.folders):
        section = kept_of(folder, "private")
        accepted = evidence.accepted_of(client)
        trained = 0.0 if section is None else float(section.tensors["own"][0])
        counts["private tensors"] += 1
        if trained != accepted:
            yield f"P1: the private tensor of client-{client} has {trained:g} trainings, and {accepted} were accepted"


def residuals_explain_histories(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P1, P5, P6 although the server's state was reverted: some history explains all updates, models and residuals."""
    try:
        check_rounds(evidence.state, evidence.folders, SIZE, *evidence.lost)
    except AssertionError as error:
        yield f"P6: no history of the clients explains what is stored: {str(error)[:300]}"
    counts["models"] += sum(bool(round_.model) for round_ in evidence.rounds)
    counts["residuals"] += len(evidence.folders)


def charges_cover_updates(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """The accounts of privacy: each model is charged once, and each update that has left a client."""
    rounds = _charged_rounds(evidence, counts)
    published = [round_.round for round_ in evidence.rounds if round_.model]
    if rounds != published:
        yield f"P1: charged were the rounds {sorted(set(rounds) ^ set(published))} or models, and not both"
    if evidence.charged_rounds != len(published):
        yield f"P1: the account has {evidence.charged_rounds} rounds, and {len(published)} were published"
    yield from _client_charges(evidence, counts)


def charges_cover_sums(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """The accounts of privacy, if clients add the noise: each sum is charged once, also if no model comes of it."""
    rounds = _charged_rounds(evidence, counts)
    if missing := {round_.round for round_ in evidence.rounds if round_.model} - set(rounds):
        yield f"P1: the rounds {sorted(missing)} have a model, and were not charged"
    if len(set(rounds)) != len(rounds) or evidence.charged_rounds != len(rounds):
        yield f"P1: the account has {evidence.charged_rounds} rounds, and these were charged: {rounds}"
    yield from _client_charges(evidence, counts)


def _charged_rounds(evidence: Evidence, counts: Counter[str]) -> list[int]:
    rounds = [int(str(number)) for (number,) in ask(evidence.state, "SELECT round FROM charges ORDER BY round")]
    counts["charges"] += len(rounds)
    return rounds


def _client_charges(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    for client, (folder, sent) in enumerate(zip(evidence.folders, evidence.sent, strict=True)):
        has_account = (folder / "privacy.json").exists()
        charged = sum(account_in(folder)["rounds"].values()) if has_account else 0
        counts["charges"] += charged
        if charged < len(sent):
            yield f"P1: client-{client} has charged {charged} updates, and {len(sent)} have left it"
        if evidence.accepted_of(client) and not sent:
            yield f"P1: the line of client-{client} has seen none of its updates"
        trained = len(trained_rounds(folder.with_name(f"{folder.name}.notes")))
        if charged > trained:  # an update is charged before it leaves, and may then not leave, as its round is over
            yield f"P1: client-{client} has charged {charged} updates, and has made only {trained}"


def charges_cover_samples(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """The accounts of samples: all steps of each training are charged, and each update that left a client is one's."""
    steps = evidence.job["epochs"] * math.ceil(evidence.job["subset_size"] / evidence.job["batch_size"])
    for client, (folder, sent) in enumerate(zip(evidence.folders, evidence.sent, strict=True)):
        has_account = (folder / "privacy.json").exists()
        spent = [entry["steps"] for entry in account_in(folder).get("samples", [])] if has_account else []
        charged = sum(spent) // steps
        counts["charges"] += charged
        if any(each % steps for each in spent):
            yield f"P1: client-{client} has charged a part of a training: {spent} steps, and a training has {steps}"
        if charged < len(sent) or (evidence.accepted_of(client) and not sent):
            yield f"P1: client-{client} has charged {charged} trainings, and {len(sent)} updates have left it"
        log, name = evidence.logs[f"client-{client}"], f"client-{client}"
        told = log.count("this client's samples have spent")
        # A training is charged before this is said. In between, the client may be killed, or its disk may fail.
        ends = sum(evidence.done.get(f"{harm} of {name}", 0) for harm in ("kill -9", *_DISK_HARMS))
        ends += sum(times for words, times in evidence.done.items() if re.fullmatch(f"crash at .* of {name}", words))
        if not told <= charged <= told + ends:
            yield f"P1: {name} has charged {charged} trainings, and has said {told}, with {ends} kills or failures"


def noise_is_there_once(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P1: a model of clients that add noise moves by noise for as many as have survived, which hides all the rest."""
    clip, clients = evidence.job["dp"]["clip"], len(evidence.folders)
    fewest, honest = evidence.job["min_clients_to_aggregate"], evidence.job["min_clients_to_aggregate"] - 1
    least, most = (clip * math.sqrt(survivors / honest) / clients for survivors in (fewest, clients))
    for round_ in evidence.rounds:
        if round_.model:
            spread = float((evidence.values_of(round_.model) - evidence.values_of(round_.base)).std())
            counts["models"] += 1
            if not 0.93 * least < spread < 1.07 * most:
                yield f"P1: the noise of round {round_.round} is {spread:.4f}, and not {least:.4f} to {most:.4f}"


def rounds_end_in_time(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P3: a round ends by its deadline, and only the time in which there was no server does not count."""
    most = evidence.job["deadline_seconds"] + evidence.down_seconds + _SLACK
    for round_ in evidence.rounds:
        # Without an update, it may still have waited for its clients, which has a time of its own.
        if round_.seconds > most and evidence.by_round.get(round_.round):
            yield f"P3: round {round_.round} took {round_.seconds:.0f} s, and had no more than {most:.0f}"


def models_are_those_of_the_second_run(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P7: each model is byte for byte that of the same job on the same fleet without harms."""
    runs = [
        [evidence.models[round_.model][0] for round_ in evidence.rounds if round_.model and round_.job_id == job_id]
        for job_id in (evidence.job_id, evidence.second_id)
    ]
    counts["models"] += len(runs[0])
    if len(runs[0]) != evidence.job["rounds"] or len(runs[1]) != evidence.job["rounds"]:
        yield f"P7: {len(runs[0])} and {len(runs[1])} models came of {evidence.job['rounds']} rounds"
    for number, (one, other) in enumerate(zip(*runs, strict=False), 1):
        if one != other:
            yield f"P7: the model of round {number} is not that of the run without harms"
            return


def models_are_those_of_the_twin(evidence: Evidence, counts: Counter[str]) -> Iterator[str]:
    """P5: each model is byte for byte that of an undisturbed run, as long as each round has had all clients."""
    from tests.campaign.twins import twin_digests

    regular = []
    for round_ in evidence.rounds:
        if round_.reason not in ("", *_OF_ITS_JOB):
            yield f"P3: round {round_.round} was abandoned ({round_.reason}), though no client was away for long"
    for round_ in evidence.rounds:
        if (
            round_.job_id != evidence.job_id
            or not round_.model
            or len(evidence.by_round.get(round_.round, [])) < len(evidence.folders)
        ):
            break
        regular.append(round_)
    if not regular:
        return
    expected = twin_digests(evidence, len(regular))
    for round_, digest in zip(regular, expected, strict=True):
        counts["models"] += 1
        if evidence.models[round_.model][0] != digest:
            yield f"P5: model {round_.model} is not that of the undisturbed twin"
            return


def _far(one: np.ndarray, other: np.ndarray, *, scale: int = 1) -> bool:
    """Return whether two vectors differ by more than rounding explains; lessons are even integers."""
    return bool(np.abs(one - other).max() > min(0.5, 1e-3 * scale + 0.1))
