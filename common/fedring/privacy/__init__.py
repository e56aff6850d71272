"""Differential privacy: the noise that is added, and how much privacy it costs.

`noise` draws Gaussian noise from a secret key, and `account` computes epsilon with dp-accounting, which it imports when
it is first needed. The package is pure: it reads no file and no clock, and imports no other package of fedring. Which
updates are clipped, and where secrets and charges are kept, is in `fedring.server`; what a site demands is in
`fedring.client.privacy`; the training that protects single samples is in `fedring.train.private_loop`.
"""
