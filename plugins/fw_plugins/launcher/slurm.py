"""Runs as SLURM batch jobs: a script with one task per rank, which saves when it is preempted and queues itself again."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from fw.api import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USER,
    LauncherPlugin,
    LaunchSection,
    Prepare,
    RunError,
    Submitted,
    UserError,
)
from fw.api.launching import Job

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED")
_LAST_WORDS_SECONDS = 120
_ENDED_BY_SIGTERM = 143  # asked to stop before training had begun
_END = "FW_CONFIG_END"


@dataclass
class SlurmConfig:
    """What the job asks for. Empty options leave the choice to the site."""

    time: str = ""
    """Longest run time of the job, as sbatch has it: minutes, `H:MM:SS` or `D-HH:MM:SS`. No effect on memory."""
    partition: str = ""
    """Partition, which decides what hosts the job may have and so their memory."""
    account: str = ""
    """Account that is charged. No effect on memory."""
    qos: str = ""
    """Quality of service. No effect on memory."""
    gpus: str = ""
    """GPUs of a host, a number or `TYPE:NUMBER`; empty for one per rank, `0` for none. With launch.accelerator=cpu none are asked for."""
    cpus_per_task: int = 0
    """CPU cores of a rank; 0 for launch.threads, else the site's default. No effect on memory."""
    mem: str = ""
    """Host memory of the job on each host, like `64G`; the kernel kills ranks that go beyond it. `0` for all of the host's."""
    requeue: bool = True
    """Queue the job again when it was preempted or has reached its time, with resume=auto. No effect on memory."""
    grace: int = 120
    """Seconds before the end of its time at which the ranks are asked to save. No effect on memory."""
    sbatch: list[str] = field(default_factory=list)
    """More options of sbatch, like `--constraint=h100`. No effect on memory."""
    srun: list[str] = field(default_factory=list)
    """More options of srun, like `--cpu-bind=cores`. No effect on memory."""
    prologue: list[str] = field(default_factory=list)
    """Commands before training, like `module load cuda`. No effect on memory."""
    python: str = ""
    """Python of the ranks, with fw; empty for the one that submits, as found on a shared file system. No effect on memory."""

    def __post_init__(self) -> None:
        if self.time and not _TIME.fullmatch(self.time):
            raise UserError(f"launcher.time: '{self.time}' is no time for sbatch; write minutes, H:MM:SS or D-HH:MM:SS")
        for name in ("cpus_per_task", "grace"):
            if getattr(self, name) < 0:
                raise UserError(f"launcher.{name}: {getattr(self, name)} is too small; the least is 0")
        for option in [*self.sbatch, *self.srun]:
            if not option.startswith("-") or "\n" in option:
                raise UserError(f"launcher: '{option}' is no option; write it like --constraint=h100")


class SlurmLauncher(LauncherPlugin):
    """A SLURM batch job, one srun task per rank, saved and queued again when preempted; `fw launch slurm CONFIG` submits it."""

    api = 1
    Config = SlurmConfig
    config: SlurmConfig
    shares_files = True

    def launch(self, command: Sequence[str], launch: LaunchSection, prepare: Prepare) -> int:
        """Refused: under srun the ranks are there already, elsewhere it takes a job."""
        raise UserError(
            "launcher 'slurm' starts no ranks from 'fw train' itself; submit with 'fw launch slurm CONFIG', run it under srun,"
            " or give launcher=local"
        )

    def submission(self, job: Job) -> str:
        """The batch script."""
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options(job)), "", *self._body(job)]) + "\n"

    def submit(self, job: Job, text: str) -> Submitted:
        """Hand the script to sbatch."""
        if shutil.which("sbatch") is None:
            raise UserError(
                "there is no 'sbatch' on this machine; submit from a login node of the cluster, or print the script by --dry-run"
            )
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"sbatch did not take the job: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
        number = done.stdout.strip().partition(";")[0]
        return Submitted(number, f"submitted job {number}; its output: slurm-{number}.out, that of its ranks: slurm-{number}/rank-*.log")

    def _options(self, job: Job) -> list[str]:
        config, launch = self.config, job.launch
        options = [
            f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', job.name)}",
            f"--nodes={launch.nodes}",
            f"--ntasks-per-node={launch.devices}",
            "--output=slurm-%j.out",
            "--open-mode=append",  # a job that is queued again goes on in its files
            "--requeue" if config.requeue else "--no-requeue",
        ]
        gpus = config.gpus or ("" if launch.accelerator == "cpu" else str(launch.devices))
        cpus = config.cpus_per_task or launch.threads
        asked = {
            "gpus-per-node": "" if gpus == "0" else gpus,
            "cpus-per-task": cpus,
            "mem": config.mem,
            "time": config.time,
            "partition": config.partition,
            "account": config.account,
            "qos": config.qos,
            "signal": f"TERM@{config.grace}" if config.grace else "",  # to the ranks, not to this script
        }
        return [*options, *(f"--{name}={value}" for name, value in asked.items() if value), *config.sbatch]

    def _body(self, job: Job) -> list[str]:
        config = self.config
        python = shlex.quote(config.python or sys.executable)
        name = shlex.quote(f"{job.name}.yaml")
        srun = ["srun", "--kill-on-bad-exit=0", f"--wait={_LAST_WORDS_SECONDS}", "--open-mode=append"]
        if cpus := config.cpus_per_task or job.launch.threads:
            srun.append(f"--cpus-per-task={cpus}")  # srun does not take it from the job
        srun += map(shlex.quote, config.srun)
        again = [
            f"case $code in {EXIT_REQUEUE} | {_ENDED_BY_SIGTERM})",
            '  if [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then  # and was not cancelled',
            '    echo "fw: asked to stop; job $SLURM_JOB_ID is queued again"',
            "    scontrol requeue $SLURM_JOB_ID && exit 0",
            "  fi ;;",
            "esac",
        ]
        return [
            "trap : TERM  # this script outlives its ranks, to queue them again",
            *config.prologue,
            "here=slurm-$SLURM_JOB_ID",
            "mkdir -p $here || exit 1",
            f"cat >$here/{name} <<'{_END}'",
            job.config_text.rstrip("\n"),
            _END,
            "resume=()",
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(resume=auto); fi',
            "failures=0",
            "while :; do",
            f'  {" ".join(srun)} --output="$here/rank-%t.log" \\',
            f'    {python} -m fw train "$here/"{name} train.run_dir={shlex.quote(str(job.run_dir))} launch.max_restarts=0 "${{resume[@]}}"',
            "  code=$?",
            f"  case $code in {EXIT_OK} | {EXIT_USER} | {EXIT_REQUEUE} | {EXIT_INTERRUPTED} | {_ENDED_BY_SIGTERM}) break ;; esac",
            f"  if [ $failures -ge {job.launch.max_restarts} ]; then break; fi",
            "  failures=$((failures + 1))",
            "  resume=(resume=auto)",
            '  echo "fw: the run failed with $code; started again from its newest checkpoint"',
            "done",
            *(again if config.requeue else []),
            "exit $code",
        ]
