"""Train a tiny model for a few steps as a specification says, and save its parameters: `train_once.py SPEC OUT`.

Tests call `train` in their own process, and run this file under torchrun where a run takes several processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DEFAULTS = dict(
    per_device_train_batch_size=2,
    max_steps=1,
    learning_rate=1.0,
    # Plain SGD without clipping: the change of the parameters is minus the gradient.
    optim="sgd",
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    # The order of the rows, so that how they are split is the only difference.
    train_sampling_strategy="sequential",
    seed=0,
)


def train(spec: dict, output_dir: str):
    """Run a specification; returns the trainer.

    Keys: `trainer` (a name in trl_ext, or "trl.DPOTrainer"), `model` (path), `reference_seed` (perturb the reference by
    this seed; None for TRL's own), `pairs`, `lora`, `lora_dropout`, and `args` for the configuration.
    """
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import trl_ext
    from tests.tiny import pairs, perturbed

    name = spec.get("trainer", "PreferenceTrainer")
    stock = name.startswith("trl.")
    trainer_class = trl.DPOTrainer if stock else getattr(trl_ext, name)
    config_class = trl.DPOConfig if stock else trainer_class._config_class
    arguments = {**DEFAULTS, **spec.get("args", {}), "output_dir": output_dir}
    if stock:
        arguments.setdefault("max_length", None)
    lora = None
    if spec.get("lora"):
        lora = LoraConfig(
            r=4, lora_alpha=8, lora_dropout=spec.get("lora_dropout", 0.0), target_modules=["q_proj", "v_proj", "up_proj"]
        )
        lora.init_lora_weights = False  # B is zero otherwise, and the first gradients of A with it
    load = lambda: AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)  # noqa: E731
    reference = None
    if spec.get("reference_seed") is not None:
        reference = perturbed(load(), seed=spec["reference_seed"])
    trainer = trainer_class(
        load(),
        reference,
        args=config_class(**arguments),
        train_dataset=Dataset.from_list(pairs(spec.get("pairs", 8), seed=spec.get("data_seed", 0))),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        peft_config=lora,
    )
    trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
    return trainer


def parameters(trainer) -> dict:
    """The trained parameters by name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def main() -> None:
    from safetensors.torch import save_file

    spec, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    trainer = train(spec, str(out.parent / f"{out.stem}-run"))
    assert trainer.accelerator.num_processes == spec.get("processes", 1), trainer.accelerator.num_processes
    if trainer.accelerator.is_main_process:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        save_file(parameters(trainer), out, metadata={"losses": json.dumps(losses)})


if __name__ == "__main__":
    main()
