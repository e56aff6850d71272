"""The modes of jobs, by name."""

from collections.abc import Mapping

from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.jobs.job_table import TrainingMode
from fedring.train.jobs.pipeline_table import Pipeline

MODES: Mapping[str, type[TrainingMode]] = {
    "federated": TrainingMode,
    "data_parallel": DataParallel,
    "pipeline": Pipeline,
}
