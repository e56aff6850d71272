"""Differential privacy: noise, and its accounting.

Central: `noise` draws Gaussian noise from a secret key, for a server to add. Distributed: `integer_plan` says how the
clients of a group turn vectors into integers, `integers` does it, with a share of `skellam` noise from each client, and
undoes it for their sum. `charges` has the cost of one release, and `account` computes epsilon of all of them with
dp-accounting, which it imports when it is first needed.

The package is pure: it reads no file and no clock, and may import no other package of fedring. Which updates are
clipped, and where secrets and charges are kept, is in `fedring.server`; a site's demands are in
`fedring.client.policy.privacy`; the training that protects single samples is in `fedring.train.private_loop`.
"""
