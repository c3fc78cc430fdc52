"""Of starting and watching processes: what launcher plugins share. Imports no torch."""

from fw.launching import network, outcome, stacks
from fw.launching.cores import threads_of_rank
from fw.launching.fate import Fate, fates
from fw.launching.job import Job
from fw.launching.rank_log import LOG_DIR

__all__ = ["LOG_DIR", "Fate", "Job", "fates", "network", "outcome", "stacks", "threads_of_rank"]
