"""What can be known to be wrong before the first round."""

import logging
import os
from pathlib import Path

from fedring.client.config import ClientConfig
from fedring.client.trainer import NAMES, trusted_by
from fedring.daemon.config import ConfigError
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.tls import check_tls, read_token
from fedring.train.device import pick_device
from fedring.train.errors import SeamError
from fedring.train.seam import resolve

log = logging.getLogger(__name__)


def check(config: ClientConfig) -> None:
    """Return if a client with this configuration can start; ConfigError, in one sentence, if not."""
    if not _writable(config.state_dir):
        raise ConfigError(f"state_dir {config.state_dir} cannot be written: give the client a folder of its own")
    if config.data_root is not None and not config.data_root.is_dir():
        raise ConfigError(f"data_root {config.data_root} is no folder: create it, or correct the path")
    check_tls(config.tls)
    if config.token_file:
        read_token(config.token_file)
    try:
        pick_device(config.device)
        for part in NAMES:
            if name := getattr(config, part):
                resolve(name, trusted_by(config))
    except SeamError as error:
        raise ConfigError(str(error)) from error


def warn_of_insecurity(config: ClientConfig) -> None:
    """The log says what `insecure = true` leaves open."""
    if not (is_loopback(config.server) or encrypts(config.server, config.tls)):
        log.warning("insecure: whoever is between can read and change what goes to and from %s", config.server)
    if not (is_loopback(config.peer_listen) or config.tls.mutual):
        log.warning("insecure: whoever reaches %s can take part in data-parallel training", config.peer_listen)


def _writable(folder: Path) -> bool:
    """Whether `folder` exists and can be written, or can be made."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
