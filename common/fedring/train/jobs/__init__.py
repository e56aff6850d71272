"""The schema of a job: its keys, its tables, and their demands of each other. No torch."""
