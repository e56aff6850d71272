"""A job from a script: start it, watch it, and use its best model. Usage: python run_job.py [HOST:PORT]"""

import sys

from fedring.control import Failure, connect
from fedring.train.models import digits_mlp

JOB = {
    "name": "from a script",
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "rounds": 3,
    "epochs": 2,
    "min_clients": 2,
}

try:
    with connect(*sys.argv[1:]) as server:  # without an address: FLCTL_SERVER, or 127.0.0.1:8444
        job = server.start(JOB)
        for row in job.watch():  # a row for each round, as soon as it has ended
            print(f"round {row['job_round']}: accuracy {row['accuracy']}, {row['upload_bytes']} bytes sent up")
        best = job.best()
        model = job.load_model(digits_mlp(), "best")
except Failure as failure:
    sys.exit(f"{failure}")

print(f"the best model is that of round {best and best['job_round']}: {model}")
