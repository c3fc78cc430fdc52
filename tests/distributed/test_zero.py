"""ZeRO against one process, over gloo with real processes: losses, norms, checkpoints from and for other shardings, memory, the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from conftest import TINY, column, corpus_text, environment, metrics
from distributed.operators import HAS_COMPILER, has_libaio
from distributed.ranks import ends, run_ranks

pytest.importorskip("deepspeed")

HERE = Path(__file__).parent
CELLS = {
    "zero1": ("sharding.stage=1",),
    "zero2": ("sharding.stage=2",),
    "zero3": ("sharding.stage=3",),
    "zero2_cpu": ("sharding.stage=2", "offload={optimizer: cpu}"),
    "zero3_cpu": ("sharding.stage=3", "offload={optimizer: cpu, params: cpu}"),
}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
PRECISIONS = ["fp32", pytest.param("bf16", marks=pytest.mark.slow)]
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="DeepSpeed's operators need g++")


def launch(directory: Path, ranks: int, runs: list[list[str]]) -> None:
    """Train one run after another, in the same processes."""
    done = run_ranks("train_in_turn.py", ranks, runs, directory)
    assert "DeepSpeed" not in done.stdout and "MA " not in done.stdout, done.stdout


def prepare(*operators: str) -> None:
    """As the launching process would."""
    from fw_plugins.sharding.zero import ops

    ops.prepare(operators, print, "cpu")


def run(name: str, precision: str, *options: str, resume: str = "") -> list[str]:
    zero = ["sharding.name=zero"] if any(o.startswith("sharding.") for o in options) else []
    resumed = [f"resume={resume}/checkpoints/step-00000005"] if resume else []
    return [f"train.run_dir={name}", f"precision={precision}", "train.max_steps=10", "train.save_every=5", *zero, *options, *resumed]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One launch of one rank, one of two, one of one; all tests look at what these have left, and none at more than their precisions."""
    directory = tmp_path_factory.mktemp("zero")
    (directory / "corpus.txt").write_text(corpus_text())
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    cases = [item.callspec.params for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    precisions = [each for each in TOLERANCE if each == "fp32" or any(case.get("precision") == each for case in cases)]
    cells = {name: options for name, options in CELLS.items() if HAS_COMPILER or not name.endswith("cpu")}
    two = [run(f"{name}-{p}", p, *options) for p in precisions for name, options in cells.items()]
    for p in precisions:
        two += [run(f"{name}-again-{p}", p, *cells[name], resume=f"{name}-{p}") for name in cells if name != "zero2"]
        two.append(run(f"zero3-zero1-{p}", p, *CELLS["zero1"], resume=f"zero3-{p}"))
        two.append(run(f"zero3-fsdp-{p}", p, "sharding=fsdp", resume=f"zero3-{p}"))
        two += [run(f"single-{name}-{p}", p, *cells[name], resume=f"single-{p}") for name in ("zero1", "zero2", "zero3")]
    measured = ("objective.z_loss=0.1", "train.val_every=5")
    two.append(run("zero3-measured-fp32", "fp32", *CELLS["zero3"], *measured))
    if HAS_COMPILER:
        prepare("cpu_adam")
    launch(directory, 1, [*(run(f"single-{p}", p) for p in precisions), run("single-measured-fp32", "fp32", *measured)])
    launch(directory, 2, two)
    last = [run(f"zero3-single-{p}", p, resume=f"zero3-{p}") for p in precisions]
    launch(directory, 1, [*last, run("alone-fp32", "fp32", *CELLS["zero3"])])
    return directory


def differ(trained: Path, one: str, other: str, steps: int, key: str = "loss") -> float:
    a, b = column(trained / one, key)[-steps:], column(trained / other, key)[-steps:]
    assert len(a) == len(b) == steps
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_one_rank_equals_one_process(trained):
    assert differ(trained, "alone-fp32", "single-fp32", 10) <= 1e-6
    assert differ(trained, "alone-fp32", "single-fp32", 10, "grad_norm") <= 1e-6


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cell", [pytest.param(c, marks=[NEEDS_COMPILER] * c.endswith("cpu")) for c in CELLS if c != "zero2"])
def test_a_resumed_run_goes_on_bit_by_bit(trained, cell, precision):
    assert column(trained / f"{cell}-again-{precision}", "loss") == column(trained / f"{cell}-{precision}", "loss")[5:]
    assert column(trained / f"{cell}-again-{precision}", "grad_norm") == column(trained / f"{cell}-{precision}", "grad_norm")[5:]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "resumed, began",
    [(f"zero3-{to}", "zero3") for to in ("single", "zero1", "fsdp")] + [(f"single-{to}", "single") for to in ("zero1", "zero2", "zero3")],
)
def test_checkpoints_pass_between_shardings(trained, resumed, began, precision):
    """The five steps after the checkpoint against those of the run that wrote it: state that got lost would show in the second."""
    tolerance = {"fp32": 1e-5, "bf16": 1e-3}[precision]
    assert differ(trained, f"{resumed}-{precision}", f"{began}-{precision}", 5) <= tolerance


def test_validation_measures_what_one_process_does(trained):
    """And no z-loss: the engine is in evaluation where the model is."""
    rows = [
        [row["val_loss"] for row in metrics(str(trained / run)) if row["val_loss"]]
        for run in ("zero3-measured-fp32", "single-measured-fp32")
    ]
    assert len(rows[0]) == 2
    assert [float(loss) for loss in rows[0]] == pytest.approx([float(loss) for loss in rows[1]], rel=1e-5)
    assert differ(trained, "zero3-measured-fp32", "single-measured-fp32", 10) <= 1e-5


def test_tied_heads_experts_and_other_optimizers(tmp_path):
    """What stage 3 gathers in unusual places, against one process."""
    (tmp_path / "corpus.txt").write_text(corpus_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    experts = "{name: mixtral, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 96, num_local_experts: 4}"
    cases = {
        "tied": "model.tie_word_embeddings=true",
        "experts": f"model={experts}",
        "momentum": "optimizer={name: sgd, lr: 0.01, momentum: 0.9}",
    }
    short = ["train.max_steps=5"]
    launch(tmp_path, 1, [[option, *short, f"train.run_dir={name}-one"] for name, option in cases.items()])
    zero = ["sharding={name: zero, stage: 3}", *short]
    launch(tmp_path, 2, [[option, *zero, f"train.run_dir={name}-zero"] for name, option in cases.items()])
    for name in cases:
        for key in ("loss", "grad_norm"):
            assert differ(tmp_path, f"{name}-zero", f"{name}-one", 5, key) <= 1e-5, name


def test_moments_of_another_dtype_than_the_weights_are_kept_as_they_are(tmp_path):
    (tmp_path / "corpus.txt").write_text(corpus_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    runs = []
    for stage in (1, 3):
        shared = ["optimizer=adamw_bf16", f"sharding={{name: zero, stage: {stage}}}", "train.max_steps=4", "train.save_every=2"]
        again = [f"resume=straight-{stage}/checkpoints/step-00000002", f"train.run_dir=again-{stage}"]
        runs += [[*shared, f"train.run_dir=straight-{stage}"], [*shared, *again]]
    launch(tmp_path, 2, runs)
    for stage in (1, 3):
        tensors = load_file(tmp_path / f"straight-{stage}/checkpoints/step-00000002/optimizer.safetensors")
        assert {str(t.dtype) for name, t in tensors.items() if "exp_avg" in name} == {"torch.bfloat16"}
        straight, again = (column(str(tmp_path / f"{run}-{stage}"), "loss") for run in ("straight", "again"))
        assert again == straight[2:]


def test_transformers_loads_a_checkpoint(trained):
    transformers = pytest.importorskip("transformers")
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(trained / f"{name}-fp32/checkpoints/latest").state_dict()
        for name in ("zero3", "single")
    ]
    assert loaded[0].keys() == loaded[1].keys()
    assert all((loaded[0][name] - loaded[1][name]).abs().max() < 1e-5 for name in loaded[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_run_directory_has_the_json(trained, precision):
    made = json.loads((trained / f"zero3-{precision}/deepspeed.json").read_text())
    assert made["zero_optimization"]["stage"] == 3 and made.get("bf16", {}).get("enabled", False) == (precision == "bf16")
    assert made["train_batch_size"] == 8 and made["gradient_accumulation_steps"] == 2 and made["gradient_clipping"] == 1.0
    assert not (trained / f"single-{precision}/deepspeed.json").exists()


def test_memory_of_stage_3_falls_with_the_ranks(tmp_path):
    """Bytes of all tensors a rank holds after a step, on 1, 2 and 4 ranks."""
    (tmp_path / "corpus.txt").write_text(corpus_text(50))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    for ranks in (1, 2, 4):
        state(tmp_path, ranks, "memory")
    held = {ranks: [json.loads((tmp_path / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)] for ranks in (1, 2, 4)}
    for precision in ("fp32", "bf16"):
        alone = held[1][0][precision]
        assert all(abs(each[precision] * ranks / alone - 1) < 0.03 for ranks in (2, 4) for each in held[ranks]), held


def state(directory: Path, ranks: int, what: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    environ = {**environment(), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(HERE / "zero_state.py"), what]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, ends(done.stderr)


@pytest.mark.skipif(not has_libaio(), reason="nvme needs g++ and libaio's header")
def test_the_disk_holds_what_is_offloaded_to_it(tmp_path):
    """10 steps with parameters and optimizer in files, fp32 and bf16, against one process; what they hold, and that they are gone."""
    (tmp_path / "corpus.txt").write_text(corpus_text(50))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    prepare("cpu_adam", "pin_memory", "async_io")
    state(tmp_path, 2, "disk")
