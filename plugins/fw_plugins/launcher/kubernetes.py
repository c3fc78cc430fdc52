"""Runs as Kubeflow jobs: a manifest in which each pod is a host that runs ``fw train`` with the local launcher."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from fw.api import LauncherPlugin, LaunchSection, Prepare, RunError, Submitted, UserError
from fw.api.launching import Job

_CONFIG_DIR = "/etc/fw"
_PORT = 29500
_BACKOFF_LIMIT = 3
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[mkMGTPE])?")
_LONGEST_NAME = 40  # what operators append must fit into a label's 63 characters


@dataclass
class KubernetesConfig:
    """What the job asks for."""

    image: str = ""
    """Container image with fw and its Python; required."""
    resource: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """`pytorchjob` (kubeflow.org/v1, Training Operator) or `trainjob` (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2.2 or later)."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a trainjob. No effect on memory but what it sets itself."""
    job_name: str = ""
    """Name of the job; empty for the config's, in lower case."""
    namespace: str = ""
    """Namespace; empty for kubectl's own."""
    volumes: list[str] = field(default_factory=list)
    """`CLAIM:PATH`: persistent volume claims and where they are mounted. train.run_dir must be in one, which all pods can write."""
    gpus: int | None = None
    """GPUs of a pod; empty for one per rank, or none with launch.accelerator=cpu."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    cpus: str = ""
    """CPU cores of a pod, like `16` or `500m`; empty for the cluster's default. No effect on memory."""
    mem: str = ""
    """Host memory of a pod, like `64Gi`; beyond it the kernel kills ranks. Empty for the cluster's default."""
    shm: str = ""
    """Largest size of /dev/shm, like `8Gi`, which counts as host memory; empty for half of the host's."""
    env: list[str] = field(default_factory=list)
    """`NAME=VALUE`: environment variables of the pods. No effect on memory."""
    secrets: list[str] = field(default_factory=list)
    """`NAME=SECRET:KEY`: environment variables from Kubernetes secrets. No effect on memory."""
    node_selector: list[str] = field(default_factory=list)
    """`LABEL=VALUE`: labels of the nodes that may be used, and so their memory."""
    service_account: str = ""
    """Service account of the pods. No effect on memory."""
    backoff_limit: int | None = None
    """Restarts of pods before a pytorchjob is given up; empty for 3. A trainjob's runtime decides that itself."""
    grace: int = 120
    """Seconds that a pod has to save when it is evicted. No effect on memory."""
    python: str = "python"
    """Python of the image, with fw. No effect on memory."""


class KubernetesLauncher(LauncherPlugin):
    """A Kubeflow PyTorchJob or TrainJob, a pod per host; `fw launch kubernetes CONFIG --image IMAGE` applies it."""

    api = 1
    Config = KubernetesConfig
    config: KubernetesConfig

    def launch(self, command: Sequence[str], launch: LaunchSection, prepare: Prepare) -> int:
        """Refused: the pods are started by an operator."""
        raise UserError(
            "launcher 'kubernetes' starts no ranks from 'fw train' itself; apply a job with 'fw launch kubernetes CONFIG --image IMAGE',"
            " or give launcher=local"
        )

    def submission(self, job: Job) -> str:
        """The manifest: a ConfigMap with the config, and the job."""
        self._check(job)
        name = _name(self.config.job_name or job.name)
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{name}-config"),
            "data": {f"{job.name}.yaml": job.config_text},
        }
        made = self._pytorchjob(name, job) if self.config.resource == "pytorchjob" else self._trainjob(name, job)
        return yaml.dump_all([config_map, made], Dumper=_Dumper, sort_keys=False, explicit_start=True, width=1000)

    def submit(self, job: Job, text: str) -> Submitted:
        """Apply the manifest, or write it where there is no kubectl."""
        name = _name(self.config.job_name or job.name)
        if shutil.which("kubectl") is None:
            file = Path(f"{name}.kubernetes.yaml")
            file.write_text(text)
            return Submitted(None, f"there is no 'kubectl' on this machine; wrote {file}, to be applied with 'kubectl apply -f {file}'")
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"kubectl did not take the job: {' '.join(done.stderr.split())}")
        said = "; ".join(done.stdout.splitlines()).strip("; ")
        return Submitted(name, f"{said}; its state: kubectl get {self.config.resource} {name}")

    def _check(self, job: Job) -> None:
        config = self.config
        if not config.image:
            raise UserError("launcher.image: a pod needs a container image with fw; give --image IMAGE")
        if job.resume not in ("", "auto"):
            raise UserError(f"resume: pods that are started again go on with resume=auto, and so cannot begin from {job.resume}")
        if config.resource == "trainjob" and config.backoff_limit is not None:
            raise UserError("launcher.backoff_limit: a trainjob takes it from its runtime; leave it out, or choose resource=pytorchjob")
        mounts = [PurePosixPath(path) for _, path in self._claims()]
        run_dir = PurePosixPath(job.run_dir)
        if not any(run_dir.is_relative_to(mount) for mount in mounts):
            raise UserError(
                f"train.run_dir: {run_dir} would be lost with its pod; give launcher.volumes='[CLAIM:/runs]' and"
                f" train.run_dir=/runs/{run_dir.name}"
            )
        for option in ("cpus", "mem", "shm"):
            if (value := getattr(config, option)) and not _QUANTITY.fullmatch(value):
                raise UserError(f"launcher.{option}: '{value}' is no quantity of Kubernetes; write it like 64Gi (memory) or 16 (CPUs)")

    def _claims(self) -> list[tuple[str, str]]:
        return [_pair(text, ":", "volumes", "CLAIM:PATH") for text in self.config.volumes]

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, **({"namespace": self.config.namespace} if self.config.namespace else {})}

    def _command(self, job: Job, first_host: str) -> list[str]:
        launch = job.launch
        # The operator's RANK numbers pods; the ranks in them are the launcher's to number.
        command = ["env", "-u", "RANK", "-u", "WORLD_SIZE", self.config.python, "-m", "fw", "train", f"{_CONFIG_DIR}/{job.name}.yaml"]
        command += ["launcher=local", f"train.run_dir={job.run_dir}", "resume=auto"]
        if launch.nodes > 1:
            command.append(f"launch.rendezvous={first_host}:{launch.port or _PORT}")
        return command

    def _environment(self) -> list[dict[str, Any]]:
        plain = [_pair(text, "=", "env", "NAME=VALUE") for text in self.config.env]
        secret = [(name, _pair(source, ":", "secrets", "NAME=SECRET:KEY")) for name, source in self._secrets()]
        return [
            *({"name": name, "value": value} for name, value in plain),
            *({"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}} for name, (of, key) in secret),
        ]

    def _secrets(self) -> list[tuple[str, str]]:
        return [_pair(text, "=", "secrets", "NAME=SECRET:KEY") for text in self.config.secrets]

    def _resources(self, launch: LaunchSection) -> dict[str, Any]:
        config = self.config
        gpus = config.gpus if config.gpus is not None else 0 if launch.accelerator == "cpu" else launch.devices
        asked = {"cpu": config.cpus, "memory": config.mem, config.gpu_resource: str(gpus or "")}
        limits = {key: value for key, value in asked.items() if value != ""}
        return {"limits": limits, "requests": limits} if limits else {}

    def _volumes(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Volumes and where they are mounted."""
        shm = {"medium": "Memory", **({"sizeLimit": self.config.shm} if self.config.shm else {})}
        volumes: list[dict[str, Any]] = [
            {"name": "fw-config", "configMap": {"name": f"{name}-config"}},
            {"name": "fw-shm", "emptyDir": shm},  # the containers' own 64 MiB are too few for data loaders and NCCL
        ]
        mounts: list[dict[str, Any]] = [{"name": "fw-config", "mountPath": _CONFIG_DIR}, {"name": "fw-shm", "mountPath": "/dev/shm"}]
        for number, (claim, path) in enumerate(self._claims()):
            volumes.append({"name": f"fw-volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": f"fw-volume-{number}", "mountPath": path})
        return volumes, mounts

    def _pod(self) -> dict[str, Any]:
        config = self.config
        selector = dict(_pair(text, "=", "node_selector", "LABEL=VALUE") for text in config.node_selector)
        return {
            "terminationGracePeriodSeconds": config.grace,
            **({"nodeSelector": selector} if selector else {}),
            **({"serviceAccountName": config.service_account} if config.service_account else {}),
        }

    def _pytorchjob(self, name: str, job: Job) -> dict[str, Any]:
        volumes, mounts = self._volumes(name)
        container = {
            "name": "pytorch",  # the name by which the operator knows it
            "image": self.config.image,
            "command": self._command(job, f"{name}-master-0"),
            "env": self._environment(),
            "resources": self._resources(job.launch),
            "volumeMounts": mounts,
        }
        # An eviction ends the ranks with 75 after they have saved; OnFailure starts the pod again, and resume=auto goes on.
        pod = {"restartPolicy": "OnFailure", "template": {"spec": {**self._pod(), "containers": [container], "volumes": volumes}}}
        replicas = {"Master": {"replicas": 1, **pod}}
        if job.launch.nodes > 1:
            replicas["Worker"] = {"replicas": job.launch.nodes - 1, **pod}
        limit = self.config.backoff_limit
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": self._metadata(name),
            "spec": {
                "nprocPerNode": str(job.launch.devices),
                "runPolicy": {"backoffLimit": _BACKOFF_LIMIT if limit is None else limit, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": replicas,
            },
        }

    def _trainjob(self, name: str, job: Job) -> dict[str, Any]:
        volumes, mounts = self._volumes(name)
        patch = {**self._pod(), "containers": [{"name": "node", "volumeMounts": mounts}], "volumes": volumes}
        replicated = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(name),
            "spec": {
                "runtimeRef": {"name": self.config.runtime},
                "trainer": {
                    "image": self.config.image,
                    "command": self._command(job, "$(PET_MASTER_ADDR)"),
                    "numNodes": job.launch.nodes,
                    "numProcPerNode": job.launch.devices,
                    "env": self._environment(),
                    "resourcesPerNode": self._resources(job.launch),
                },
                "runtimePatches": [
                    {"manager": "fw.launch/kubernetes", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
                ],
            },
        }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; what stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _pair(text: str, separator: str, option: str, form: str) -> tuple[str, str]:
    first, found, second = text.partition(separator)
    if not (first and found and second):
        raise UserError(f"launcher.{option}: '{text}' is not of the form {form}")
    return first, second


def _name(text: str) -> str:
    """As Kubernetes allows names (RFC 1123 label)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    if not name:
        raise UserError(f"launcher.name: '{text}' has no letter or digit that a Kubernetes name may have")
    return name
