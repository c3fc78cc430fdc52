"""The manifest, read by the typed models that Kubeflow generates from its schemas; and what its pods make of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from conftest import REPOSITORY, environment
from fw.cli import main

POD = ("sharding=ddp", "train.run_dir=/runs/tiny", "launcher.volumes=[runs:/runs]", "--image", "registry.example/fw:1")
MANY = ("launch.nodes=3", "launch.devices=2", "train.global_batch_size=6", "train.micro_batch_size=1", "launch.accelerator=auto")


@pytest.fixture
def manifest(workspace, capsys):
    def written(*words: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["launch", "kubernetes", "tiny.yaml", *POD, "--dry-run", *words]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return written


def as_pytorchjob(made: dict[str, Any]) -> dict[str, Any]:
    """Through the models of the Training Operator and of Kubernetes and back; what they do not know is lost, what is missing raises."""
    models = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client")
    for name in dir(models):
        if name.startswith("KubeflowOrgV1"):
            setattr(client.models, name, getattr(models, name))
    api = client.ApiClient()
    return api.sanitize_for_serialization(api.deserialize(SimpleNamespace(data=json.dumps(made)), "KubeflowOrgV1PyTorchJob"))


OPTIONS = (
    "launcher.env=[NCCL_DEBUG=INFO]",
    "launcher.secrets=[HF_TOKEN=hub:token]",
    "launcher.node_selector=[pool=gpu]",
    "launcher.service_account=trainer",
    "launcher.namespace=ml",
    "launcher.mem=64Gi",
    "launcher.cpus=16",
    "launcher.shm=8Gi",
)


def test_a_pytorchjob_is_what_the_operators_models_know(manifest):
    config, made = manifest(*MANY, *OPTIONS)
    assert as_pytorchjob(made) == made
    assert as_pytorchjob({**made, "spec": {**made["spec"], "nprocPerNod": "2"}}) == made, "an unknown field is lost on the way"
    replicas = made["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"], made["spec"]["nprocPerNode"]) == (1, 2, "2")
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["command"][-2:] == ["resume=auto", "launch.rendezvous=tiny-master-0:29500"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert config["metadata"] == {"name": "tiny-config", "namespace": "ml"} and pod["nodeSelector"] == {"pool": "gpu"}
    assert "Worker" not in manifest()[1]["spec"]["pytorchReplicaSpecs"] and "gpu" not in json.dumps(manifest()[1])


def test_a_trainjob_is_what_the_trainers_models_know(manifest):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, made = manifest(*MANY, *OPTIONS, "launcher.resource=trainjob")
    assert models.TrainerV1alpha1TrainJob.from_dict(made).to_dict() == made
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 2) and "launch.rendezvous=$(PET_MASTER_ADDR):29500" in trainer["command"]


def test_a_pod_trains_with_the_command_and_config_of_the_manifest(manifest, workspace):
    # As a pod would: the config map as a directory, the operator's variables, which number pods.
    words = ("launch.devices=2", f"train.run_dir={workspace}/runs/tiny", f"launcher.volumes=[claim:{workspace}/runs]")
    config, made = manifest(*words, "train.max_steps=2", f"launcher.python={REPOSITORY}/.venv/bin/python")
    container = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    Path("mounted").mkdir()
    for name, text in config["data"].items():
        Path("mounted", name).write_text(text)
    command = [word.replace("/etc/fw/", "mounted/") for word in container["command"]]
    operators = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}
    done = subprocess.run(command, env={**environment(), **operators}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path("runs/tiny/summary.json").is_file() and "2 ranks, ddp" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.run_dir=runs/x"], "train.run_dir: runs/x would be lost with its pod; give launcher.volumes='[CLAIM:/runs]'"),
        (["resume=/runs/old"], "resume: pods that are started again go on with resume=auto"),
        (["launcher.mem=64GiB"], "launcher.mem: '64GiB' is no quantity of Kubernetes; write it like 64Gi"),
        (["launcher.volumes=[runs]"], "launcher.volumes: 'runs' is not of the form CLAIM:PATH"),
        (["launcher.resource=trainjob", "launcher.backoff_limit=1"], "a trainjob takes it from its runtime"),
        (["launcher.resource=job"], "launcher.resource"),
    ],
)
def test_wrong_input_is_refused(workspace, capsys, words, message):
    assert main(["launch", "kubernetes", "tiny.yaml", *POD, "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_image_is_asked_for(workspace, capsys):
    assert main(["launch", "kubernetes", "tiny.yaml", *POD[:3], "--dry-run"]) == 2
    assert "launcher.image: a pod needs a container image with fw; give --image IMAGE" in capsys.readouterr().err


def test_it_is_applied_where_there_is_kubectl_else_written(workspace, capsys, monkeypatch):
    tools = workspace / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}")
    assert main(["launch", "kubernetes", "tiny.yaml", *POD]) == 0
    assert "wrote tiny.kubernetes.yaml, to be applied with 'kubectl apply -f tiny.kubernetes.yaml'" in capsys.readouterr().out
    assert len(list(yaml.safe_load_all(Path("tiny.kubernetes.yaml").read_text()))) == 2
    shell = shutil.which("sh", path=os.defpath)
    (tools / "kubectl").write_text(f'#!{shell}\necho "$@"\n/bin/cat >applied\necho no such kind >&2\nexit ${{CODE:-0}}\n')
    (tools / "kubectl").chmod(0o755)
    assert main(["launch", "kubernetes", "tiny.yaml", *POD]) == 0
    assert "apply -f -; its state: kubectl get pytorchjob tiny" in capsys.readouterr().out
    assert Path("applied").read_text() == Path("tiny.kubernetes.yaml").read_text()
    monkeypatch.setenv("CODE", "1")
    assert main(["launch", "kubernetes", "tiny.yaml", *POD]) == 1
    assert "kubectl did not take the job: no such kind" in capsys.readouterr().err
