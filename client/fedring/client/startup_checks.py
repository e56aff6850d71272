"""Checks of a configuration at start-up, before the first round."""

import logging
from collections.abc import Iterator

from fedring.client.config import ClientConfig
from fedring.client.policy.identity import load_signer
from fedring.client.policy.privacy import check_policy
from fedring.client.training.trainer import offered_by
from fedring.daemon.checks import Check, Level, check_data_root, check_writable, refuse_failed
from fedring.offers import PARTS
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.tls import check_tls, read_token
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.names.name_checks import check_data, check_device, check_name, check_offered

log = logging.getLogger(__name__)


def check(config: ClientConfig) -> None:
    """Check that a client with this configuration can start.

    Raises:
        ConfigError: If it cannot; the message is one sentence.
    """
    refuse_failed([check_writable("state_dir", config.state_dir)])
    check_tls(config.tls)
    if config.token_file:
        read_token(config.token_file)
    refuse_failed(check_names(config))
    check_policy(config.privacy)
    if config.privacy.needs_secure:
        log.info("other sites can pin this client by %s", load_signer(config.tls, config.state_dir).fingerprint)


def check_names(config: ClientConfig, job: Job | None = None) -> Iterator[Check]:
    """Check the data folder, the device, and the named functions.

    The functions are named by the configuration or the job.

    Args:
        config: The configuration. Its names take precedence over those of the job.
        job: The job; None = check the configuration alone.

    Yields:
        The result of each check.
    """
    yield from check_data_root(config.data_root)
    yield check_device(config.device)
    try:
        offered = offered_by(config)
    except SeamError as error:
        yield Check("trusted", Level.FAIL, str(error))
        return
    yield from check_offered(offered)
    for part in PARTS:
        name = getattr(config, part) or getattr(job, part, "")
        if name and part == "data":
            yield check_data(part, name, offered, root=config.data_root)
        elif name:
            yield check_name(part, part, name, offered)


def warn_of_insecurity(config: ClientConfig) -> None:
    """Log a warning for everything that `insecure = true` exposes."""
    for address in config.servers:
        if not (is_loopback(address) or encrypts(address, config.tls)):
            log.warning("insecure: others on the network can read and change the traffic to and from %s", address)
    if not (is_loopback(config.peer_listen) or config.tls.mutual):
        log.warning("insecure: anybody who can reach %s can take part in data-parallel training", config.peer_listen)
