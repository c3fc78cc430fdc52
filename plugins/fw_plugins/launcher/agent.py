"""torchrun's elastic agent, which asks the ranks why they failed before it ends or restarts them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from fw.api import FwError, Prepare, RunError, UserError
from fw.api.launching import LOG_DIR, Fate, fates, outcome, stacks

_GRACE_SECONDS = 2.0
"""For which ranks that lost a peer may say so, and a rank may write its stacks, before they are ended."""
_ATTEMPT = "fw/attempt"


class RankEnvironment(LogsSpecs):
    """Adds what fw tells its ranks to what the agent tells them; they write their logs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[str, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called once per attempt, before the ranks start."""
        for env in envs.values():
            env.update(self.added)
        console = dict.fromkeys(envs, "")
        return LogsDest(dict(console), dict(console), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """None: logs are in the run directory."""
        return os.devnull


class RankAgent(LocalElasticAgent):
    """Attempts are prepared by the first host, judged before their ranks are ended, and restarted only if that can help."""

    def __init__(
        self,
        spec: WorkerSpec,
        outcomes: Path,
        prepare: Prepare,
        failed: Callable[[list[Fate], bool], None],
        stop_asked: Callable[[], bool],
        join_seconds: int,
    ) -> None:
        self._environment = RankEnvironment()
        super().__init__(spec, self._environment, exit_barrier_timeout=join_seconds)
        self._outcomes = outcomes
        self._prepare = prepare
        self._failed = failed
        self._stop_asked = stop_asked
        self._join_seconds = join_seconds
        self._attempt = -1
        self.fates: list[Fate] = []
        """Of the last attempt that failed, the rank to blame first."""

    @property
    def outcomes(self) -> Path:
        """What the ranks of the present attempt leave."""
        return Path(self._environment.added[outcome.OUTCOME_DIR])

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        shared = self._agree(worker_group)
        self._environment.added = {
            **shared,
            outcome.OUTCOME_DIR: tempfile.mkdtemp(prefix=f"{self._attempt}-", dir=self._outcomes),
            outcome.LAUNCHER_PID: str(os.getpid()),
        }
        if logs := shared.get(LOG_DIR):
            Path(logs).mkdir(parents=True, exist_ok=True)
        return super()._start_workers(worker_group)

    def _agree(self, worker_group: WorkerGroup) -> dict[str, str]:
        """What the first host prepares, on all of them."""
        store = worker_group.store
        assert store is not None
        if worker_group.group_rank == 0:
            try:
                shared = dict(self._prepare(self._attempt))
            except FwError as error:
                store.set(_ATTEMPT, json.dumps({"error": str(error), "code": error.exit_code}))
                raise
            store.set(_ATTEMPT, json.dumps(shared))
            return shared
        store.wait([_ATTEMPT], timedelta(seconds=self._join_seconds))
        shared = json.loads(store.get(_ATTEMPT))
        if "error" in shared:
            raise (UserError if shared["code"] == UserError.exit_code else RunError)(shared["error"])
        return shared

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        codes = [_exit_code(pid) for pid in pids.values()]
        if any(codes) or any((self.outcomes / f"rank-{rank}.failure").exists() for rank in pids):
            self._judge(pids)
        elif None in codes:
            # Not asked of the agent, which may see a rank's end that came after our look, and would not have it judged.
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            if self._stop_asked() or (self.fates and self.fates[0].is_user_error):
                self._remaining_restarts = 0
            self._failed(self.fates, self._remaining_restarts > 0)
        return result

    def _shutdown(self, *how: Any, **more: Any) -> None:
        """End ranks that are left: of a run whose other hosts have gone, or that goes on with new ones."""
        pids = {worker.global_rank: int(worker.id) for worker in self._worker_group.workers if worker.id is not None}
        if any(_exit_code(pid) is None for pid in pids.values()):
            self._judge(pids)
        super()._shutdown(*how, **more)

    def _judge(self, pids: dict[int, int]) -> None:
        """Wait a little for ranks that are about to fail too, have the rest write their stacks, end them, and say who is to blame."""
        _wait(lambda: all(_exit_code(pid) is not None for pid in pids.values()))
        ended = {rank: code for rank, pid in pids.items() if (code := _exit_code(pid)) is not None}
        left = {rank: pids[rank] for rank in pids if rank not in ended}
        logs = Path(self._environment.added[LOG_DIR]) if LOG_DIR in self._environment.added else None
        texts = _stacks(self.outcomes, left)
        for rank, pid in left.items():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if outcome.failure_of(self.outcomes, rank) is not None:
                ended[rank] = 1
                texts.pop(rank)
        self.fates = fates(self.outcomes, logs, {rank: code for rank, code in ended.items() if code}, texts)


def _exit_code(pid: int) -> int | None:
    """Of a child that has ended, negative for a signal; it stays to be waited for. 0 where that has been done; None if it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _stacks(directory: Path, pids: dict[int, int]) -> dict[int, str]:
    """Ask ranks for their stacks; returns what their stack files hold then."""
    files = {rank: stacks.stack_file(directory, rank) for rank in pids}
    sizes = {rank: file.stat().st_size for rank, file in files.items() if file.exists()}
    for rank in sizes:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], stacks.ASK_SIGNAL)
    _wait(lambda: all(stacks.main_stack(files[rank].read_text(errors="replace")) for rank in sizes))
    return {rank: file.read_text(errors="replace") if rank in sizes else "" for rank, file in files.items()}


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
