"""`train.ema_decay`: the average of the weights, beside a computation by hand from what each step left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import column, fw, summary
from distributed.faulty import installed

DECAY = 0.3
RUN = (f"train.ema_decay={DECAY}", "train.max_steps=6", "train.save_every=1", "train.val_every=3", "optimizer.lr=0.01")
TWO = ("sharding=fsdp", "launch.devices=2")
MODELS = {
    "llama": [],
    "gpt2, whose files are transposed": ["model={name: gpt2, n_embd: 32, n_layer: 2, n_head: 2}"],
    "bf16_true": ["precision=bf16_true"],
    "fsdp": TWO,
    "tensor": [*TWO, "sharding.tensor=2"],
    "updates in backward": ["optimizer.in_backward=true", "train.gradient_clip_norm=0", "train.micro_batch_size=null"],
    "on the host": ["offload.optimizer=cpu"],
    "lora": ["peft={name: lora, rank: 2}"],
}


def step(run: str, number: int) -> Path:
    return Path(run) / "checkpoints" / f"step-{number:08}"


def weights(run: str, number: int, stem: str | None = None) -> dict[str, torch.Tensor]:
    (file,) = step(run, number).glob(f"{stem}.safetensors" if stem else "*model.safetensors")
    return load_file(file)


def followed(run: str, steps: int) -> dict[str, torch.Tensor]:
    """The average from step 1 on, whose own is taken as it is."""
    average = {name: tensor.double() for name, tensor in weights(run, 1, "average").items()}
    for number in range(2, steps + 1):
        decay = min(DECAY, (1 + number) / (10 + number))
        for name, tensor in weights(run, number).items():
            average[name] = decay * average[name] + (1 - decay) * tensor.double()
    return average


@pytest.mark.parametrize("case", MODELS)
def test_it_is_the_average_of_what_steps_left(workspace, case):
    fw("train", "tiny.yaml", *RUN, *MODELS[case]).ok()
    expected, found = followed("run", 6), weights("run", 6, "average")
    assert expected.keys() == found.keys() == weights("run", 6).keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert json.loads((step("run", 6) / "trainer.json").read_text())["scalars"]["ema_updates"] == 6


def test_the_first_step_is_averaged_with_what_the_run_began_from(workspace):
    fw("train", "tiny.yaml", "train.max_steps=1", "train.save_every=1", "train.run_dir=base").ok()
    base = str(step("base", 1))
    fw("train", "tiny.yaml", *RUN, f"model={{name: auto, path: {base}}}").ok()
    decay = 2 / 11
    for name, before in weights("base", 1).items():
        expected = decay * before + (1 - decay) * weights("run", 1)[name]
        torch.testing.assert_close(weights("run", 1, "average")[name], expected)


@pytest.mark.parametrize("words", [[], TWO, ["precision={name: bf16, full_eval: true}"], ["precision=bf16_true"]], ids=str)
def test_validation_sees_it_and_training_does_not(workspace, words):
    fw("train", "tiny.yaml", *RUN, *words).ok()
    fw("train", "tiny.yaml", *RUN, *words, "train.ema_decay=0", "train.run_dir=plain").ok()
    assert column("run", "loss") == column("plain", "loss")
    assert summary("run")["val_loss"] != summary("plain")["val_loss"]
    dtype = "bf16" if words == ["precision=bf16_true"] else "fp32"
    fw("checkpoint", "export", "run", "--to", "averaged", "--average", "--dtype", dtype).ok()
    model = "model={name: auto, path: averaged}"
    fw("train", "tiny.yaml", *RUN, *words, "train.ema_decay=0", model, "train.max_steps=1", "optimizer.lr=0", "train.run_dir=again").ok()
    assert summary("again")["val_loss"] == pytest.approx(summary("run")["val_loss"], rel=1e-6)


@pytest.mark.parametrize(("first", "second"), [([], []), ([], TWO), (TWO, []), (TWO, [*TWO, "sharding.tensor=2"])], ids=str)
def test_a_resumed_run_goes_on_with_it(workspace, first, second):
    fw("train", "tiny.yaml", *RUN, *first).ok()
    fw("train", "tiny.yaml", *RUN, *second, f"resume={step('run', 3)}", "train.run_dir=again").ok()
    one, other = weights("run", 6, "average"), weights("again", 6, "average")
    for name, tensor in one.items():
        if first == second:
            assert torch.equal(tensor, other[name])
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


def test_it_may_begin_and_end_with_a_resumed_run(workspace):
    fw("train", "tiny.yaml", *RUN, "train.ema_decay=0").ok()
    assert not (step("run", 3) / "average.safetensors").exists()
    fw("train", "tiny.yaml", *RUN, f"resume={step('run', 3)}", "train.run_dir=begun").ok()
    decay = 2 / 11
    for name, before in weights("run", 3).items():
        expected = decay * before + (1 - decay) * weights("begun", 4)[name]
        torch.testing.assert_close(weights("begun", 4, "average")[name], expected)
    fw("train", "tiny.yaml", *RUN, "train.ema_decay=0", f"resume={step('begun', 5)}", "train.run_dir=ended").ok()
    assert not (step("ended", 6) / "average.safetensors").exists()
    assert column("ended", "loss")[-1:] == column("begun", "loss")[-1:]


def test_it_is_exported_moved_and_compared_like_weights(workspace):
    fw("train", "tiny.yaml", *RUN).ok()
    fw("checkpoint", "export", "run", "--to", "averaged", "--average").ok()
    theirs = AutoModelForCausalLM.from_pretrained("averaged", dtype=torch.float32).state_dict()
    for name, tensor in weights("run", 6, "average").items():
        assert torch.equal(theirs[name], tensor)
    fw("checkpoint", "reshard", str(step("run", 6)), "--to", "moved", "--max-shard-size", "50KB").ok()
    fw("checkpoint", "verify", "moved/step-00000006").ok()
    fw("checkpoint", "export", "moved/step-00000006", "--to", "again", "--average").ok()
    assert (Path("again") / "model.safetensors").read_bytes() == (Path("averaged") / "model.safetensors").read_bytes()
    assert fw("checkpoint", "diff", str(step("run", 6)), "moved/step-00000006").code == 0
    refused = fw("checkpoint", "export", "run", "--to", "averaged", "--average")
    assert refused.code == 2 and "exists already" in refused.err
    fw("train", "tiny.yaml", *RUN, "train.ema_decay=0", "train.run_dir=plain").ok()
    refused = fw("checkpoint", "export", "plain", "--to", "none", "--average")
    assert refused.code == 2 and "holds no average of weights; a run with train.ema_decay=0.999 keeps one" in refused.err
    assert not Path("none").exists()


def test_adapters_are_exported_in_pefts_format(workspace):
    fw("train", "tiny.yaml", "train.max_steps=1", "train.save_every=1", "train.run_dir=base").ok()
    words = [f"model={{name: auto, path: {step('base', 1)}}}", "peft={name: lora, rank: 2}"]
    fw("train", "tiny.yaml", *RUN, *words).ok()
    for flag, stem in ((["--average"], "average"), ([], "adapter_model")):
        fw("checkpoint", "export", "run", "--to", stem, *flag).ok()
        found, own = load_file(f"{stem}/adapter_model.safetensors"), weights("run", 6, stem)
        assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)
        fw("checkpoint", "merge", str(step("base", 1)), stem, "--to", f"merged-{stem}").ok()
    one, other = (AutoModelForCausalLM.from_pretrained(f"merged-{stem}") for stem in ("average", "adapter_model"))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    fw("checkpoint", "reshard", str(step("run", 6)), "--to", "moved").ok()
    moved, own = load_file("moved/step-00000006/adapter_model.safetensors"), weights("run", 6)
    assert moved.keys() == own.keys() and all(torch.equal(moved[name], own[name]) for name in own)


@pytest.mark.parametrize("words", [[], ["peft={name: lora, rank: 2}"]], ids=str)
def test_it_goes_back_with_the_weights(workspace, tmp_path_factory, words):
    """To step 4 from step 6, which leaves what it leaves to have skipped steps 5 and 6."""
    env = installed(tmp_path_factory.mktemp("site"))
    words = [*RUN, *words, *TWO, "train.max_steps=8", "train.save_every=4", "objective=faulty", "objective.how=inf", "train.val_every=0"]
    done = fw("train", "tiny.yaml", *words, "train.on_nonfinite=roll_back", "objective.steps=[6]", "train.run_dir=back", env=env).ok()
    assert "going on from" in done.err, done.err
    fw("train", "tiny.yaml", *words, "train.on_nonfinite=skip", "objective.steps=[5,6]", "train.run_dir=skipped", env=env).ok()
    back, skipped = weights("back", 8, "average"), weights("skipped", 8, "average")
    assert all(torch.equal(back[name], tensor) for name, tensor in skipped.items())


def test_it_takes_what_is_planned(workspace):
    more = (*RUN, "train.save_every=0", "memory.measure_step=3")
    measured, planned = {}, {}
    for decay in (0, DECAY):
        words = (*more, f"train.ema_decay={decay}", f"train.run_dir=decay-{decay}")
        fw("train", "tiny.yaml", *words).ok()
        measured[decay] = json.loads(Path(f"decay-{decay}/memory.json").read_text())["per_rank"][0]
        planned[decay] = json.loads(fw("plan", "tiny.yaml", *words, "--json").ok().out)["per_rank"][0]
        assert measured[decay]["allocated_peak_bytes"] == pytest.approx(planned[decay]["allocated_peak_bytes"], abs=64)
        assert measured[decay]["components_max"]["optimizer_bytes"] == planned[decay]["components_max"]["optimizer_bytes"]
    parts = {decay: found["components_max"] for decay, found in measured.items()}
    assert parts[DECAY]["optimizer_bytes"] - parts[0]["optimizer_bytes"] == parts[0]["parameters_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.ema_decay=1"], "train.ema_decay: 1.0 is not from 0 to below 1"),
        (["train.ema_decay=-0.1"], "train.ema_decay: -0.1 is not from 0 to below 1"),
        (["sharding=zero"], "train.ema_decay: zero keeps what it trains in flat tensors"),
    ],
)
def test_what_cannot_be_is_refused(workspace, words, said):
    done = fw("train", "tiny.yaml", *RUN, *words)
    assert done.code == 2 and said in done.err and not Path("run").exists()
