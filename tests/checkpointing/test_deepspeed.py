"""Checkpoints of DeepSpeed's own engines, converted, against what the engines held and what DeepSpeed's own script makes of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import environment
from fw.checkpointing.deepspeed_pickle import load
from fw.cli import main
from fw.errors import UserError
from fw.pretrained.convert import convert

pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
PLAIN = [f"{stage}-{precision}-plain" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
NAMED = ["0-fp32-llama", "2-fp32-gpt2", "3-bf16-gpt2", "3-fp32-ownmixtral"]
# DeepSpeed computes in float16 only on processors that do so themselves.
ALONE = [*(["1-fp16-plain"] if torch.ops.mkldnn._is_mkldnn_fp16_supported() else []), "2-fp32-plain1"]
SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One launch of two ranks and one of one."""
    directory = tmp_path_factory.mktemp("deepspeed")
    configs = {
        "llama": transformers.LlamaConfig(**SMALL, **SIZES),
        "gpt2": transformers.GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=4, n_positions=16),
        "mixtral": transformers.MixtralConfig(**SMALL, **SIZES, num_local_experts=3),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    for ranks, cases in ((2, [*PLAIN, *NAMED, "0-fp32-plain"]), (1, ALONE)):
        worker = [str(HERE / "deepspeed_engines.py"), str(directory), *cases]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *worker],
            env={**environment(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return directory


def split(path):
    return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")


@pytest.mark.parametrize("case", [*PLAIN, *ALONE])
def test_bit_by_bit_what_the_engine_held(saved, tmp_path, case):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    convert(saved / case, tmp_path / "made")
    weights, states = split(tmp_path / "made")
    held = torch.load(saved / f"{case}.held.pt")
    for name, tensor in held.items():
        assert torch.equal((states if "/" in name else weights)[name], tensor.float()), name
    assert set(states) == {n for n in held if "/" in n} | {f"{n}/step" for n in held if "/" not in n}
    assert all(states[f"{n}/step"] == 3 for n in held if "/" not in n)
    script = get_fp32_state_dict_from_zero_checkpoint(str(saved / case))
    assert set(weights) == {*held} - {n for n in held if "/" in n} | {"frozen.weight", "frozen.bias"}
    for name, tensor in weights.items():
        if name in script:  # it leaves out frozen parameters of stage 1
            assert torch.equal(tensor, script[name].float()), name


def test_stage_0_is_the_module_and_says_what_it_cannot_tell(saved, tmp_path):
    made = convert(saved / "0-fp32-plain", tmp_path / "made")
    held = torch.load(saved / "0-fp32-plain.held.pt")
    weights = load_file(tmp_path / "made/model.safetensors")
    assert all(torch.equal(weights[name], held[name]) for name in weights) and "head.weight" not in weights
    assert made.states == 0 and "frozen" in made.notes[0]


@pytest.mark.parametrize("case", NAMED)
def test_a_known_architecture_has_its_own_names(saved, tmp_path, case):
    """Weights as transformers names and lays them out; states by fw's names and shapes, against the engine's."""
    from fw.pretrained import load_model

    kind = case.rpartition("-")[2].removeprefix("own")
    convert(saved / case, tmp_path / "made", model=str(saved / kind))
    held = torch.load(saved / f"{case}.held.pt")
    _, states = split(tmp_path / "made")
    model = load_model(tmp_path / "made")  # refuses missing, unexpected and mis-shaped tensors
    loaded = dict(model.named_parameters())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert {n.rpartition("/")[0] for n in states} == set(loaded)
    if case.endswith("own" + kind):
        assert all(torch.equal(loaded[n], t.float()) for n, t in held.items() if "/" not in n)
        assert all(torch.equal(states[n], t.float()) for n, t in held.items() if "/" in n)
        return
    for own, parameter in loaded.items():
        (source,) = model.hf_tensors(own)
        value, average = held[source.name].float(), held[f"{source.name}/exp_avg"].float()
        assert torch.equal(parameter, value.t() if source.transposed else value), own
        assert torch.equal(states[f"{own}/exp_avg"], average.t() if source.transposed else average), own


def copied(saved, tmp_path, case):
    shutil.copytree(saved / case, tmp_path / "in")
    return tmp_path / "in/global_step3"


@pytest.mark.parametrize(
    "case, file",
    [("1-fp32-plain", "zero_pp_rank_1_mp_rank_00_optim_states.pt"), ("3-bf16-plain", "zero_pp_rank_1_mp_rank_00_model_states.pt")],
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_rank_is_named(saved, tmp_path, case, file, damage):
    path = copied(saved, tmp_path, case) / file
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=file) as caught:
        convert(tmp_path / "in", tmp_path / "made")
    assert "\n" not in str(caught.value) and not (tmp_path / "made").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_runs_nothing(saved, tmp_path, zipped):
    step, witness = copied(saved, tmp_path, "1-fp32-plain"), tmp_path / "ran"
    target = step / "mp_rank_00_model_states.pt"
    if zipped:
        torch.save({"module": {}, "evil": Evil(str(witness))}, target)
    else:
        target.write_bytes(pickle.dumps({"evil": Evil(str(witness))}))
    with pytest.raises(UserError, match=r"mkdir" if zipped else "mp_rank_00_model_states"):
        convert(tmp_path / "in", tmp_path / "made")
    assert not witness.exists()


class Asked:
    """Pickled as some releases of Python pickle members of enumerations."""

    def __init__(self, of, name):
        self.asked = of, name

    def __reduce__(self):
        return getattr, self.asked


def test_members_are_of_stages_alone(saved, tmp_path):
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for name, stage in ZeroStageEnum.__members__.items():
        torch.save({"stage": Asked(ZeroStageEnum, name)}, tmp_path / "file.pt")
        assert load(tmp_path / "file.pt") == {"stage": int(stage)}
    for of, name in ((ZeroStageEnum, "__class__"), (dict, "fromkeys"), (torch.Tensor, "numpy")):
        torch.save({"evil": Asked(of, name)}, tmp_path / "file.pt")
        with pytest.raises(UserError, match=r"file\.pt .*(which could run code and is refused|Unsupported|Unpickling)"):
            load(tmp_path / "file.pt")


def test_other_kinds_are_refused(saved, tmp_path):
    step = copied(saved, tmp_path, "1-fp32-plain")
    for name, word in (("mp_rank_01_model_states.pt", "second"), ("layer_00-model_states.pt", "pipeline")):
        (step / name).touch()
        with pytest.raises(UserError, match=word):
            convert(tmp_path / "in", tmp_path / "made")
        (step / name).unlink()
    (step / "zero").mkdir()
    with pytest.raises(UserError, match="universal"):
        convert(tmp_path / "in", tmp_path / "made")
    with pytest.raises(UserError, match="no checkpoint 'other'"):
        convert(tmp_path / "in", tmp_path / "made", tag="other")


def test_the_command_line(saved, tmp_path, capsys):
    assert main(["checkpoint", "convert", str(saved / "2-bf16-plain"), "--to", str(tmp_path / "made"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage"] == 2
    assert main(["checkpoint", "convert", str(saved / "2-bf16-plain"), "--to", str(tmp_path / "made")]) == 2
