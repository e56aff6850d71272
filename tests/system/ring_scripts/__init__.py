"""Functions and scripts that the ring's tests run as ranks in other processes."""
