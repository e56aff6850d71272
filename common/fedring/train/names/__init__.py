"""The names in a job, and the callables behind them that a daemon offers."""
