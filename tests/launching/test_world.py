"""Ranks as the environment tells them."""

from __future__ import annotations

from fw.recipe import current_world


def test_a_pod_of_kubeflows_is_no_rank():
    pod = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"}
    assert not current_world(pod).launched
    world = current_world({**pod, "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert world.launched and (world.rank, world.size) == (5, 8)


def test_slurms_variables_become_torchruns():
    env = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    env |= {"SLURM_STEP_NODELIST": "node[007-008]", "SLURM_JOB_ID": "12"}
    world = current_world(env)
    assert (world.size, world.rank, world.local_rank, world.local_size) == (4, 3, 1, 2)
    assert env["MASTER_ADDR"] == "node007" and env["MASTER_PORT"] == str(20000 + 12 * 31)  # a step of its own, a port of its own
