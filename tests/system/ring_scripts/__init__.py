"""Functions and scripts that the ring's tests run in processes of their own."""
