"""Train tiny models in several processes under an engine of accelerate, as specifications say.

`train_under` runs this file under `accelerate launch`, several specifications to one launch: `zero_once.py SPECS.json
FOLDER`. Models are given by path, as ZeRO-3 divides their parameters among the processes while they are loaded.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import rollout_once, train_once
from tests.support.tiny import pairs

DEFAULTS = {
    "max_steps": 3,
    # Adam with so large an epsilon that an update is a smooth function of the gradient: rounding stays rounding.
    "optim": "adamw_torch",
    "adam_epsilon": 0.01,
    "learning_rate": 0.01,
    "max_grad_norm": 1.0,
}
ENGINES = {"ddp": None, "zero2": 2, "zero3": 3}


@dataclass
class Run:
    """What a run leaves.

    Attributes:
        start: the parameters to train before training, whole, by name.
        parameters: the same after it.
        scores: of the training pairs, chosen then rejected, by a reward model after training; None for others.
        logs: an entry for each step, times left out.
        facts: `processes`; `engine`, as it was foreseen; `zero_stage`, None without DeepSpeed; and of the first
            process's packing, where it packs, `packed_tokens`, `padded_tokens`, `left_padded` and `reference`, whether
            the reference model is packed.
        folder: of its output.
    """

    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    scores: Tensor | None
    logs: list[dict]
    facts: dict[str, Any]
    folder: Path

    @property
    def change(self) -> Tensor:
        """What training changed, over all parameters, [P]."""
        return torch.cat([(self.parameters[name] - self.start[name]).flatten() for name in sorted(self.start)])


def train_under(engine: str, specs: dict[str, dict], folder: Path) -> dict[str, Run]:
    """Train each specification in turn in one launch of two processes on the CPU under an engine of `ENGINES`."""
    from safetensors.torch import load_file

    folder.mkdir()
    (folder / "specs.json").write_text(json.dumps(specs))
    command = ["-m", "tests.support.zero_once", str(folder / "specs.json"), str(folder)]
    launched = train_once.launch(engine if ENGINES[engine] else None, command, folder)
    assert launched.returncode == 0, launched.stderr[-8000:]
    runs = {}
    for name in specs:
        tensors = load_file(folder / f"{name}.safetensors")
        parts = {kind: {} for kind in ("start", "parameters", "scores")}
        for key, tensor in tensors.items():
            kind, _, own_name = key.partition("/")
            parts[kind][own_name] = tensor
        told = json.loads((folder / f"{name}.json").read_text())
        runs[name] = Run(
            parts["start"], parts["parameters"], parts["scores"].get("pairs"), **told, folder=folder / name
        )
        assert runs[name].facts["processes"] == 2 and runs[name].facts["zero_stage"] == ENGINES[engine]
    return runs


def uneven_pairs() -> list[dict]:
    """Pairs of which every other has responses so long, and a prompt so short, that packing saves next to nothing."""
    rows = pairs(12)
    for row in rows[::2]:
        row["prompt"][0]["content"] = "?"
        for side, letter in (("chosen", "a"), ("rejected", "b")):
            row[side][0]["content"] = letter * 700
    return rows


def build(spec: dict, output_dir: str):
    """The trainer of a specification, not yet trained, its trained parameters moved off the values they come with.

    Keys: `trainer` (PreferenceTrainer, RewardTrainer or PolicyTrainer), `model` (path), `pairs` (how many, or
    "uneven"), `lora`, `sampled` (the policy generates, where its responses are fixed else), and `args` for the
    configuration.
    """
    from peft import LoraConfig

    rows = uneven_pairs() if spec.get("pairs") == "uneven" else pairs(spec.get("pairs", 12))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    own = {"peft_config": lora if spec.get("lora") else None}
    spec = {**spec, "rows": rows, "args": {**DEFAULTS, **spec.get("args", {})}}
    if spec["trainer"] == "PolicyTrainer":
        spec["rows"] = rollout_once.prompts(8)
        if not spec.get("sampled"):
            policy_trainer, _ = train_once.classes("PolicyTrainer")
            own["trainer_class"] = type("PolicyTrainer", (rollout_once.FixedRollouts, policy_trainer), {})
    trainer = train_once.build_plain(spec, output_dir, **own)
    shift(trainer.model)
    return trainer


def shift(model) -> None:
    """Move trained parameters by numbers that depend on their names and nothing else; adapters to such numbers.

    An adapter is drawn at random and begins with no effect, and a policy begins as its own reference.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        with whole([parameter], changed=True), torch.no_grad():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.device))


def whole(parameters: list, *, changed: bool = False):
    """Parameters put together on every process for the while, where ZeRO-3 has divided them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if changed else None)


def trained_parameters(trainer, kind: str) -> dict:
    """Copies of the parameters to train, whole, by `kind` and name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with whole(list(trained.values())):
        return {f"{kind}/{name}": p.detach().clone().contiguous() for name, p in trained.items()}


def told(trainer) -> dict[str, Any]:
    """`logs` and `facts` of a run."""
    from trl_ext.models.packing import packing_of
    from trl_ext.runs.engine import engine_in_force

    plugin, packing = trainer.accelerator.state.deepspeed_plugin, trainer.packing
    facts = {
        "processes": trainer.accelerator.num_processes,
        "engine": engine_in_force(trainer.args).name,
        "zero_stage": None if plugin is None else plugin.zero_stage,
    }
    if packing is not None:
        facts |= {name: getattr(packing, name) for name in ("packed_tokens", "padded_tokens", "left_padded")}
        reference = getattr(trainer, "ref_model", None)
        facts["reference"] = reference is not None and packing_of(reference).packed_tokens > 0
    logs = [{k: v for k, v in entry.items() if "time" not in k} for entry in train_once.entries(trainer)]
    return {"facts": facts, "logs": train_once.without_times(logs)}


def run(spec: dict, folder: Path, name: str):
    """Train as a specification says and write down what `Run` holds; every process must call this."""
    from safetensors.torch import save_file

    trainer = build(spec, str(folder / name))
    tensors = trained_parameters(trainer, "start")
    trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
    trainer.save_model()
    tensors |= trained_parameters(trainer, "parameters")
    if spec["trainer"] == "RewardTrainer":
        tensors["scores/pairs"] = torch.cat(trainer.score_pairs(trainer.train_dataset))
    if trainer.accelerator.is_main_process:
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(told(trainer)))
    return trainer


def main() -> None:
    from trl_ext.rollouts import end_processes

    torch.set_num_threads(1)
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        import deepspeed

        # Collectives by gloo alone: DeepSpeed else compiles its own for one machine's processes, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, spec in specs.items():
        trainer = run(spec, folder, name)
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    main()
