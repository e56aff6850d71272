"""Fleets of which one client's files are damaged, and that compute from outside what its rounds must have done."""

import json
from base64 import b64decode
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fedring.codec import decode
from fedring.codec.digest import name_of
from fedring.compress.feedback import compress
from fedring.daemon.durable import text_after_digest
from tests.conftest import path_to
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fault.residuals import ENCODING, KEEP, has_spooled_update, residual_of, stored_model
from tests.fault.secure_fleet import secrets_of, secure_job
from tests.fault.user_trainers import delta_of, lesson_of
from tests.fleets import Control
from tests.kept import kept_of
from tests.ledgers import account_in
from tests.system.wire import vector_job
from tests.waiting import until

HERE = Path(__file__).parent
SIZE = 2000
KILLED = 137

Published = tuple[int, int, int]
"""A round's number, and the versions of its base and of the model that it published."""


class FlippedFleet(FaultyFleet):
    """A server and clients; files of the first client are damaged.

    Attributes:
        kinds: The kinds of files: a glob in the state folder, and the crash point at which the client is killed so
            that there is one; empty = it is there between rounds.
    """

    kinds: ClassVar[dict[str, tuple[str, str]]] = {}
    settings: ClassVar[dict[str, Any]] = {}
    count: ClassVar[int] = 1

    def __init__(self, folder: Path) -> None:
        trusted = {"trusted": ["fedring", "user_trainers"]}
        clients = [trusted | self.settings] * self.count
        super().__init__(folder, trusted | {"keep_models": 10, "keep_update_rounds": 10}, clients, env=path_to(HERE))
        self.state = Path(self.server.settings["state_dir"])
        self.folders = [Path(client.settings["state_dir"]) for client in self.clients]
        self.folder, self.client = self.folders[0], self.clients[0]
        for number, client in enumerate(self.clients):
            client.env["FL_TEST_CLIENT"] = str(number)
        self._job, self._newest = 0, 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.calls.__exit__(kind, error, tb)
        super().__exit__(kind, error, tb)

    def __enter__(self) -> Self:
        super().__enter__()
        assert self.run_round(start="fresh")[0] == "completed"
        self.note()
        return self

    @cached_property
    def calls(self) -> Control:
        """The connection to the server."""
        return Control(self.control)

    def job(self) -> dict[str, Any]:
        """Return the job of each round."""
        raise NotImplementedError

    def note(self) -> None:
        """Note what the next round must begin with."""

    def note_sound(self, path: Path) -> None:
        """Note what is in a file that is about to be damaged."""

    def note_failed(self) -> None:
        """Note what the next round must begin with, after one that was not published."""

    def check(self, round_: Published) -> None:
        """Assert that a round has done what it must."""
        raise NotImplementedError

    def check_folder(self) -> set[str]:
        """Assert that the client has noted all checked rounds; return words for values that are not the right ones."""
        return set()

    def stop_client(self) -> None:
        """Kill the first client, and return when the server knows."""
        self.client.kill()
        self._until("the end of a session", lambda: self._client_state() != "watching")

    def starts(self) -> bool:
        """Start the first client, which is dead; return whether it comes to the server, or else ends."""
        self._until("the end of a session", lambda: self._client_state() != "watching")
        self.client.start()
        self._until("a start", lambda: self.client.poll() is not None or self._client_state() == "watching")
        return self.client.running

    def run_round(self, crash: str = "", **keys: Any) -> tuple[str, list[str]]:
        """Run a job of one round; if the client is to be killed at a crash point, return when it is dead.

        Returns:
            The job's state, and the texts of its events.
        """
        if crash:
            self.stop_client()
            self.client.env["FL_CRASH_AT"] = crash
            self.starts()
            del self.client.env["FL_CRASH_AT"]
        self._until("all sessions", lambda: [each.state for each in self.calls.clients()] == ["watching"] * self.count)
        self._events = self.calls.events()
        self._job = self.calls.start_job(self.job() | keys).job_id
        if not crash:
            ended = self.end_round()
            self._until("the clients' notes", lambda: not any(map(has_spooled_update, self.folders)))
            self._until("the end of all secrets", lambda: not any(map(secrets_of, self.folders)))
            return ended
        assert wait_for(self, f"the crash {crash}", self.client.wait) == KILLED
        return "", []

    def end_round(self) -> tuple[str, list[str]]:
        """Wait for the end of the job; see run_round."""
        followed = self.calls.follow_job(self._job, self._events)
        texts = wait_for(self, "the end of the job", lambda: [event.text for event in followed])
        if (state := self.calls.job(self._job).state) != "completed":
            self.note_failed()
        return state, texts

    def published(self) -> list[Published]:
        """Return the rounds that were published since this was asked last."""
        query = "SELECT round, base_version, model_version FROM rounds WHERE model_version > ? ORDER BY round"
        found = [(int(str(a)), int(str(b)), int(str(c))) for a, b, c in ask(self.state, query, self._newest)]
        self._newest = max([self._newest, *(version for _, _, version in found)])
        return found

    def step(self, round_: Published) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the model that a round began with, and the one that it published."""
        return stored_model(self.state, round_[1], SIZE), stored_model(self.state, round_[2], SIZE)

    def _client_state(self) -> str:
        return {each.client_id: each.state for each in self.calls.clients()}.get(self.client.name, "")

    def _until(self, what: str, condition: Callable[[], object]) -> None:
        wait_for(self, what, lambda: until(condition))


class PlainFleet(FlippedFleet):
    """A client that keeps a residual and private tensors, which can be computed."""

    kinds: ClassVar = {
        "kept-….safetensors": ("kept-*.safetensors", ""),
        "client": ("client", ""),
        "resume_secret": ("resume_secret", ""),
        "lock": ("lock", ""),
        "update (empty)": ("update", ""),
        "update (not sent)": ("update", "client_update_spooled"),
        "update (accepted)": ("update", "client_accepted"),
        "update.left": ("update.left", "client_accepted"),
    }

    def job(self) -> dict[str, Any]:
        """See FlippedFleet."""
        return vector_job(
            model="user_trainers:halves",
            model_args={"size": SIZE},
            private=["own"],
            trainer="user_trainers:counted",
            encoding="fp32_sparse",
            keep_ratio=KEEP,
            start="newest",
            deadline_seconds=240,
            max_abandoned=1,
        )

    def note(self) -> None:
        """See FlippedFleet."""
        self.published()
        self._residuals: dict[str, NDArray[np.float32] | None] = {"": residual_of(self.folder, SIZE)}
        self._own = _private(self.folder)
        assert self._own.min() == self._own.max(), "the right values are the number of accepted updates"

    def check(self, round_: Published) -> None:
        """Compare the accepted payload with that of each residual that the client may have begun with.

        The residual before the newest accepted update is none of them: to begin with it would count it twice.
        """
        before, after = self.step(round_)
        ((digest,),) = ask(self.state, "SELECT digest FROM updates WHERE round = ?", round_[0])
        left: dict[str, NDArray[np.float32] | None] = {}
        with np.errstate(all="ignore"):
            delta = (before + delta_of(0, round_[0], SIZE)) - before
            for word, residual in [*self._residuals.items(), ("no residual", None)]:
                if residual is None or np.isfinite(delta + residual).all():
                    made = compress(delta, residual, ENCODING)
                    if name_of(made.payload) == digest:
                        left[word] = made.residual
                        sent = decode(made.payload, name=ENCODING.name, length=SIZE)
                        np.testing.assert_allclose(after, before + sent, rtol=1e-6)
        assert left, "the update was made with none of these residuals"
        self._residuals = left
        self._own = self._own + 1

    def check_folder(self) -> set[str]:
        """See FlippedFleet."""
        kept, own, words = residual_of(self.folder, SIZE), _private(self.folder), set[str]()
        begun_with = [word for word, left in self._residuals.items() if left is not None and np.array_equal(left, kept)]
        assert begun_with, "the client keeps what no update has left"
        words.add(begun_with[0])
        if not np.array_equal(own, self._own):
            assert own.min() == own.max() < self._own.min(), "these are values of an older update, or the first ones"
            words.add("older private values")
        return words - {""}


class CorrectedFleet(FlippedFleet):
    """A client that keeps a control variate and a model of its own."""

    kinds: ClassVar = {
        "kept-….safetensors (control, own)": ("kept-*.safetensors", ""),
        "update.left (control, own)": ("update.left", "client_accepted"),
    }

    def job(self) -> dict[str, Any]:
        """See FlippedFleet."""
        return {
            "scaffold": True,
            "personal": {"mu": 0.5},
            "momentum": 0.0,
            "weights": "uniform",
            "encoding": "packed",
            "subset_size": 64,
            "min_clients": 1,
            "evaluate": False,
            "start": "newest",
            "deadline_seconds": 240,
            "max_abandoned": 1,
        }

    def note(self) -> None:
        """See FlippedFleet."""
        self.published()

    def check(self, round_: Published) -> None:
        """Assert that the round has accepted one update."""
        assert len(ask(self.state, "SELECT 1 FROM updates WHERE round = ?", round_[0])) == 1

    def check_folder(self) -> set[str]:
        """Assert that the client's control variate, which is the only one, is that of the server."""
        own = kept_of(self.folder, "scaffold")
        assert own is not None
        ((blob,),) = ask(self.state, "SELECT control_blob FROM models ORDER BY version DESC LIMIT 1")
        if not blob:  # the server has noticed that the client's was lost, and begins anew
            return {"the control variate begins anew"}
        with safe_open(next(self.state.rglob(str(blob))), framework="numpy") as file:
            common = np.concatenate([file.get_tensor(name).reshape(-1) for name in file.offset_keys()])
        np.testing.assert_allclose(common, own.tensors["values"].numpy(), atol=1e-5)
        return set()


class MaskedFleet(FlippedFleet):
    """Clients whose updates are masked: what is published, and what they keep, is what they learn."""

    kinds: ClassVar = {
        "secret": ("secret", ""),
        "signing.key": ("signing.key", ""),
        "secure/finished.json": ("secure/finished.json", ""),
        "secure/released.json": ("secure/released.json", ""),
        "secure/RUN-EPOCH-ROUND.json": ("secure/*-*-*.json", "client_secure_peers"),
    }
    settings: ClassVar = {"privacy": {"require_secure_aggregation": True}}
    count: ClassVar = 3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._masks: dict[bytes, str] = {}

    def job(self) -> dict[str, Any]:
        """See FlippedFleet."""
        return secure_job(self.count, model_args={"size": SIZE}, max_abandoned=1)

    def note(self) -> None:
        """See FlippedFleet."""
        self.published()
        self._kept = self._mean_residual()

    def note_failed(self) -> None:
        """Note what the clients keep: updates of others may have been accepted before the round was abandoned."""
        self._until("the clients' notes", lambda: not any(map(has_spooled_update, self.folders)))
        self._kept = self._mean_residual()

    def note_sound(self, path: Path) -> None:
        """Note the masks in the file of a round, which must be those of no other."""
        if path in secrets_of(self.folder):
            known = json.loads(text_after_digest(path.read_bytes()))
            for key in ("masking", "own_mask"):
                assert self._masks.setdefault(b64decode(known[key]), path.name) == path.name

    def check(self, round_: Published) -> None:
        """Compare the sum of what is published and kept with what was learned."""
        before, after = self.step(round_)
        assert len(ask(self.state, "SELECT 1 FROM updates WHERE round = ?", round_[0])) == self.count
        learned = np.mean([lesson_of(client, round_[0], SIZE) for client in range(self.count)], axis=0)
        kept = self._mean_residual()
        np.testing.assert_allclose(after - before + kept, learned + self._kept, atol=1e-4)
        self._kept = kept

    def _mean_residual(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.mean([residual_of(folder, SIZE) for folder in self.folders], axis=0)
        return found


class ChargedFleet(FlippedFleet):
    """A client that keeps an account of its privacy."""

    kinds: ClassVar = {"privacy.json": ("privacy.json", "")}

    def job(self) -> dict[str, Any]:
        """See FlippedFleet."""
        dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
        keys = {"trainer": "user_trainers:steady", "weights": "uniform", "start": "newest", "deadline_seconds": 240}
        return vector_job(model_args={"size": SIZE}, dp=dp, **keys)

    def note(self) -> None:
        """See FlippedFleet."""
        self.published()
        self._charged = sum(account_in(self.folder)["rounds"].values())

    def check(self, round_: Published) -> None:
        """Note that one more update must be charged."""
        assert len(ask(self.state, "SELECT 1 FROM updates WHERE round = ?", round_[0])) == 1
        self._charged += 1

    def check_folder(self) -> set[str]:
        """See FlippedFleet."""
        assert sum(account_in(self.folder)["rounds"].values()) == self._charged
        return set()


def _private(folder: Path) -> NDArray[np.float32]:
    section = kept_of(folder, "private")
    assert section is not None
    own: NDArray[np.float32] = section.tensors["own"].numpy()
    return own
